"""Workflows make samples from a prompt. Each has a file of its own, and its name here."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from rlcore.errors import ConfigError
from rlcore.import_paths import place_of
from rlcore.interfaces import Workflow
from rollout.plugins import load_object
from rollout.workflows.agent import AgentWorkflow
from rollout.workflows.context import WorkflowContext
from rollout.workflows.env import EnvironmentWorkflow
from rollout.workflows.single_turn import SingleTurn
from rollout.workflows.verifiers_env import VerifiersWorkflow

WORKFLOWS: dict[str, Any] = {
    "single_turn": SingleTurn,
    "env": EnvironmentWorkflow,
    "agent": AgentWorkflow,
    "verifiers": VerifiersWorkflow,
}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse keys of `rollout.workflow` that a registered workflow would refuse (ConfigError)."""
    workflow = WORKFLOWS[name]
    try:
        inspect.signature(workflow).bind(None, **options)
        # none of them looks at its context before its first rollout
        workflow(cast(WorkflowContext, None), **options)
    except TypeError as error:
        raise ConfigError(f"rollout.workflow: {name}: {error}") from error


def build_workflow(context: WorkflowContext) -> Workflow:
    """The workflow of the settings, which is registered here or a `package.module:Class`.

    Raises:
        ConfigError: there is no such workflow, or it cannot be built.
    """
    settings = context.settings
    found = load_object(settings.name, WORKFLOWS, key="rollout.workflow")
    try:
        workflow: Workflow = found(context, **settings.options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # the user's constructor may raise anything
        place = place_of(getattr(found, "__init__", found), error)
        raise ConfigError(
            f"rollout.workflow: {settings.name!r} raised {type(error).__name__}: {error} at its"
            f" construction{place}"
        ) from error
    return workflow
