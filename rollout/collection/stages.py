"""Where each unfinished workflow of a runner is: at its start, in a generation, in its reward."""

from __future__ import annotations

from collections.abc import Container
from typing import Literal

from rlcore.data.prompts import Prompt

WorkflowKey = tuple[int, bool, int]
"""What runs: its draw, whether it makes the greedy baseline, and the rollout, or WHOLE group."""
Stage = Literal["start", "generation", "workflow", "reward"]


class Stages:
    """The stage and the prompt of each unfinished workflow."""

    def __init__(self) -> None:
        self._found: dict[WorkflowKey, tuple[Stage, Prompt]] = {}
        # Counted as it changes: it is asked for with thousands of workflows, at every turn.
        self.starting = 0

    def enter(self, key: WorkflowKey, stage: Stage, prompt: Prompt) -> None:
        """Note that a workflow of this prompt has come to a stage."""
        before, _ = self._found.get(key, (None, None))
        self._found[key] = (stage, prompt)
        self.starting += (stage == "start") - (before == "start")

    def leave(self, key: WorkflowKey) -> None:
        """Forget a workflow, if it is known."""
        stage, _ = self._found.pop(key, (None, None))
        self.starting -= stage == "start"

    def waiting(self, stages: Container[str], of: Container[int] | None = None) -> dict[int, str]:
        """Return draws with a workflow in one of the stages, with the id of their prompt.

        Args:
            of: look at these draws alone.
        """
        return {
            draw: prompt.prompt_id
            for (draw, _, _), (stage, prompt) in self._found.items()
            if stage in stages and (of is None or draw in of)
        }
