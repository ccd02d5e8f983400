"""The reward that a workflow itself gave: of an environment, or of an agent program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rlcore.data.sample import Sample
from rollout.rewards.base import RewardFailure, RewardPart, Score, Verdict, attempt, checked

ONLY = "reward"  # the name of an outcome that is one number


class WorkflowPart(RewardPart):
    """Reads `Sample.outcome`: the number under the part's name, else the one of an outcome alone.

    An outcome `correct` says right or wrong.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """See `RewardPart`."""
        return [attempt(partial(self._score, sample)) for sample in samples]

    def _score(self, sample: Sample) -> Score:
        outcome = sample.outcome
        if self._name not in outcome and ONLY not in outcome:
            given = ", ".join(outcome) or "none"
            return RewardFailure(
                "error",
                f"the workflow gave no reward {self._name!r} (it gave: {given}): return it from the"
                " environment's reward(), or from the agent program",
            )
        found = checked(outcome.get(self._name, outcome.get(ONLY)))
        if isinstance(found, Verdict) and "correct" in outcome:
            return Verdict(found.score, bool(outcome["correct"]))
        return found
