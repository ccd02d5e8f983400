"""Workflows make samples from a prompt. Each has a file of its own, and its name here."""

from __future__ import annotations

from rlcore.interfaces import Workflow
from rollout.plugins import load_object
from rollout.workflows.context import WorkflowContext
from rollout.workflows.single_turn import SingleTurn

WORKFLOWS = {"single_turn": SingleTurn}


def build_workflow(name: str, context: WorkflowContext) -> Workflow:
    """The workflow `name`, which is registered here or a `package.module:Class`.

    Raises:
        ConfigError: there is no such workflow.
    """
    workflow: Workflow = load_object(name, WORKFLOWS, key="rollout.workflow")(context)
    return workflow
