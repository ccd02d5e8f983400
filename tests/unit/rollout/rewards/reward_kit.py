"""Scoring as a run does it, with a scorer that is started and closed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from rlcore.config.sections.reward import RewardConfig
from rlcore.data.sample import Sample
from rollout.rewards.base import RewardPart
from rollout.rewards.scorer import FailureCounts, Scorer, build_scorer

LIMIT_S = 120


def scored(scorer: Scorer, *batches: Sequence[Sample]) -> list[FailureCounts]:
    """Score each batch in turn; its failure counts for each. Nothing may be left running."""

    async def scenario() -> list[FailureCounts]:
        try:
            await asyncio.wait_for(scorer.start(), LIMIT_S)
            return [await asyncio.wait_for(scorer.score(batch), LIMIT_S) for batch in batches]
        finally:
            await asyncio.wait_for(scorer.close(), LIMIT_S)

    return asyncio.run(scenario())


def score(config: dict[str, Any], *batches: Sequence[Sample]) -> list[FailureCounts]:
    """Score batches with the reward of a configuration."""
    return scored(build_scorer(RewardConfig.model_validate(config)), *batches)


def score_by(part: RewardPart, config: dict[str, Any], batch: Sequence[Sample]) -> FailureCounts:
    """Score a batch with one part, whose section of the configuration is `config`."""
    made = Scorer(RewardConfig.model_validate({"parts": {"p": config}}), {"p": part})
    return scored(made, batch)[0]


def parts(**functions: str) -> dict[str, Any]:
    """The configuration of a reward of functions, by the names of their parts."""
    return {"parts": {name: {"function": function} for name, function in functions.items()}}
