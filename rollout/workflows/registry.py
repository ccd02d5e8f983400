"""Finds workflows by name."""

from __future__ import annotations

from rlcore.interfaces import Workflow
from rollout.plugins import load_object
from rollout.workflows.base import WorkflowContext
from rollout.workflows.single_turn import SingleTurn


def build_workflow(name: str, context: WorkflowContext) -> Workflow:
    """The workflow `name`, which is registered here or a `package.module:Class`.

    Raises:
        ConfigError: there is no such workflow.
    """
    workflow: Workflow = load_object(name, {"single_turn": SingleTurn}, key="rollout.workflow")(
        context
    )
    return workflow
