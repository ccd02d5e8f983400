"""Sums the weighted parts of a reward, with a defined score where a part fails.

`build_scorer` makes the parts from the configuration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.config import Config
from rlcore.config.sections.reward import RewardConfig
from rlcore.data.formats import check_label
from rlcore.data.prompts import PromptSet
from rlcore.data.sample import Sample
from rlcore.errors import ConfigError
from rollout.rewards.base import RewardFailure, RewardPart, Score
from rollout.rewards.exact_match import ExactMatch
from rollout.rewards.pool import PooledPart, RewardPool

logger = logging.getLogger(__name__)

POOLED = {"math": "rollout.rewards.math:math"}
VERIFIERS = ("exact_match", "math")  # functions whose score says right (> 0) or wrong
# failures that are logged one by one; all are counted
MAX_WARNINGS = 20


@dataclass
class FailureCounts:
    """How many samples got no score."""

    errors: int = 0
    timeouts: int = 0


class Scorer:
    """Fills in `reward`, `reward_parts` and, with a verifier, `metadata["correct"]`.

    A sample of which any part failed gets `reward.on_error`, and `metadata["reward_error"]` says
    why.
    """

    def __init__(self, config: RewardConfig, parts: Mapping[str, RewardPart]) -> None:
        self._config = config
        self._parts = dict(parts)
        self._verifiers = [
            name for name, part in config.parts.items() if part.function in VERIFIERS
        ]
        self._warnings = 0

    async def start(self) -> None:
        """Start all parts."""
        await asyncio.gather(*(part.start() for part in self._parts.values()))

    async def score(self, samples: Sequence[Sample]) -> FailureCounts:
        """Score `samples` in place; returns how many failed."""
        names = list(self._parts)
        columns = await asyncio.gather(*(part.score(samples) for part in self._parts.values()))
        counts = FailureCounts()
        for sample, scores in zip(samples, zip(*columns, strict=True), strict=True):
            self._settle(sample, dict(zip(names, scores)), counts)
        return counts

    def _settle(self, sample: Sample, scores: Mapping[str, Score], counts: FailureCounts) -> None:
        sample.reward_parts = {
            name: score for name, score in scores.items() if not isinstance(score, RewardFailure)
        }
        failures = {
            name: score for name, score in scores.items() if isinstance(score, RewardFailure)
        }
        if failures:
            sample.reward = self._config.on_error
            sample.metadata["reward_error"] = "; ".join(
                f"{name}: {f.reason}" for name, f in failures.items()
            )
            timed_out = any(failure.kind == "timeout" for failure in failures.values())
            counts.timeouts += timed_out
            counts.errors += not timed_out
            self._warn(sample)
        else:
            sample.reward = sum(
                self._config.parts[name].weight * score
                for name, score in sample.reward_parts.items()
            )
        if self._verifiers:
            sample.metadata["correct"] = all(
                sample.reward_parts.get(name, 0.0) > 0 for name in self._verifiers
            )
        if self._config.non_stop_penalty is not None and sample.finish_reason == "length":
            sample.reward = self._config.non_stop_penalty

    def _warn(self, sample: Sample) -> None:
        self._warnings += 1
        if self._warnings <= MAX_WARNINGS:
            logger.warning(
                "reward of sample %d of draw %d (%s) failed and is scored %g (reward.on_error):"
                " %s%s",
                sample.index,
                sample.draw,
                sample.prompt_id,
                self._config.on_error,
                sample.metadata["reward_error"],
                "; further failures are only counted" if self._warnings == MAX_WARNINGS else "",
            )

    async def close(self) -> None:
        """Close all parts."""
        await asyncio.gather(*(part.close() for part in self._parts.values()))


# --- from the configuration -----------------------------------------------------------------------


def build_scorer(config: RewardConfig, *, vocab_size: int, device: str | None = None) -> Scorer:
    """The scorer with every part of `config`; nothing is started yet.

    Args:
        vocab_size: the policy's; a reward model must have the same.
        device: for reward models that do not set their own.

    Raises:
        ConfigError: an unknown function, or no parts.
        ModelError: a reward model that cannot be used.
    """
    if not config.parts:
        raise ConfigError("reward.parts is empty; name at least one part")
    functions: dict[str, str] = {}
    pool = RewardPool(functions, config.workers, config.timeout_s)
    parts: dict[str, RewardPart] = {}
    for name, part in config.parts.items():
        if part.model is not None:
            from rollout.rewards.model import ModelPart  # torch and transformers

            parts[name] = ModelPart(name, part.model, vocab_size=vocab_size, device=device)
        elif part.function == "exact_match":
            parts[name] = ExactMatch()
        else:
            functions[name] = _import_path(name, str(part.function))
            parts[name] = PooledPart(name, pool)
    return Scorer(config, parts)


def _import_path(part: str, function: str) -> str:
    if function in POOLED:
        return POOLED[function]
    if ":" not in function:
        raise ConfigError(
            f"reward.parts.{part}.function: {function!r} is unknown; known: exact_match,"
            f" {', '.join(POOLED)}, or package.module:function"
        )
    return function


def check_labels(config: Config, prompts: PromptSet) -> None:
    """Raises ConfigError or DataError where a verifier cannot compare with the prompts' labels."""
    verifiers = [name for name, part in config.reward.parts.items() if part.function in VERIFIERS]
    if verifiers and config.data.label_key is None:
        raise ConfigError(
            f"reward.parts.{verifiers[0]} compares with a label, but data.label_key is null"
        )
    for example in prompts.examples if verifiers else ():
        check_label(example, f"reward.parts.{verifiers[0]}")
