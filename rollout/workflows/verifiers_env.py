"""The workflow `verifiers`: an environment of the package `verifiers` makes each rollout."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.boundary.child_environment import allowed_environment
from rlcore.data.generation import Generate
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rlcore.deadlines import INTERPRETER_S
from rlcore.errors import ConfigError
from rollout.workflows import verifiers_runner
from rollout.workflows.agent import KEY, AgentWorkflow
from rollout.workflows.context import WorkflowContext

CHECKOUT = Path(__file__).resolve().parents[2]
PYTHON = CHECKOUT / ".venv-verifiers" / "bin" / "python"
INSTALL = "run scripts/install_verifiers.sh, or name the interpreter of its environment"


class VerifiersWorkflow(AgentWorkflow):
    """Runs `verifiers_runner.py`, an agent program, in the interpreter that has the package.

    Args:
        env: the environment's configuration, or only the id of its taskset.
        python: the interpreter; default: the one in .venv-verifiers.
        environment: see `AgentWorkflow`.
    """

    def __init__(
        self,
        context: WorkflowContext,
        *,
        env: str | Mapping[str, Any],
        python: str | None = None,
        environment: Sequence[str] = (),
    ) -> None:
        command, config = _command(env, python)
        super().__init__(context, command=command, environment=environment)
        # not on the command line, which every user of the machine can read
        self._row = {verifiers_runner.ENV: config}

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        """See `AgentWorkflow`. Raises ConfigError for a row without a task."""
        if verifiers_runner.COLUMN not in prompt.row:
            raise ConfigError(
                f"{KEY}: {prompt.prompt_id} has no column {verifiers_runner.COLUMN!r} with its"
                " task: make the rows with verifiers_runner.py rows (docs/environments.md)"
            )
        return await super().rollout(prompt, draw, index, generate)


def _command(env: str | Mapping[str, Any], python: str | None) -> tuple[list[str], dict[str, Any]]:
    """The agent program, and its environment's configuration. Raises ConfigError."""
    config = {"taskset": {"id": env}} if isinstance(env, str) else dict(env)
    if not (config.get("taskset") or {}).get("id"):
        raise ConfigError(
            f"{KEY}.env: got {env!r}, expected the id of a taskset, or a map with"
            " taskset: {id: ...}"
        )
    python = python or str(PYTHON)
    found = shutil.which(python)
    if found is None:
        raise ConfigError(f"{KEY}.python: there is no {python}; {INSTALL}")
    script = "from importlib.metadata import version; print(version('verifiers'))"
    try:
        asked = subprocess.run(
            [found, "-c", script],
            capture_output=True,
            text=True,
            timeout=INTERPRETER_S,
            check=True,
            env=allowed_environment(),
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"{KEY}.python: {python} has no verifiers; {INSTALL}") from error
    if not asked.stdout.startswith("0.4."):
        raise ConfigError(
            f"{KEY}.python: {python} has verifiers {asked.stdout.strip()}, expected 0.4; {INSTALL}"
        )
    return [found, str(Path(verifiers_runner.__file__)), "run"], config
