"""The built-in workflows by name; each has its own file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

from rlcore.errors import ConfigError
from rlcore.import_paths import location_of
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
    """Refuse keys that a registered workflow would refuse (ConfigError, of `rollout.workflow`)."""
    workflow = WORKFLOWS[name]
    try:
        inspect.signature(workflow).bind(None, **options)
        # no built-in workflow uses its context before its first rollout
        workflow(cast(WorkflowContext, None), **options)
    except TypeError as error:
        raise ConfigError(f"rollout.workflow: {name}: {error}") from error


def build_workflow(context: WorkflowContext) -> Workflow:
    """The configured workflow: a registered one or a `package.module:Class`.

    Raises:
        ConfigError: the workflow does not exist, or cannot be built.
    """
    settings = context.settings
    found = load_object(settings.name, WORKFLOWS, key="rollout.workflow")
    try:
        workflow: Workflow = found(context, **settings.options)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        # the user's constructor may raise anything
        place = location_of(getattr(found, "__init__", found), error)
        raise ConfigError(
            f"rollout.workflow: {settings.name!r} raised {type(error).__name__}: {error} at its"
            f" construction{place}"
        ) from error
    return workflow
