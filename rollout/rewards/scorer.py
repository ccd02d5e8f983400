"""Sums the weighted parts of a reward, with a defined score where a part fails.

`build_scorer` makes the parts from the configuration.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from rlcore.config.sections.graders import GRADERS
from rlcore.config.sections.reward import RewardConfig
from rlcore.data.sample import Sample
from rlcore.errors import ConfigError, DataError, EmptyBatch
from rollout.rewards.base import RewardFailure, RewardPart, Score, Verdict, checked
from rollout.rewards.by_source import PartsBySource
from rollout.rewards.graders import shape, text
from rollout.rewards.graders.code import CodePart
from rollout.rewards.local import LocalPart
from rollout.rewards.pool import PooledPart, RewardPool, WorkerLimits
from rollout.rewards.services.judge import JudgePart
from rollout.rewards.services.part import ServicePart
from rollout.sandbox.base import Sandbox
from rollout.sandbox.build import build_sandbox

logger = logging.getLogger(__name__)

# graders that are quick, and that no response can make slow
LOCAL: dict[str, Callable[..., Verdict]] = {
    "exact_match": text.exact_match,
    "f1": text.f1,
    "overlong": shape.overlong,
}
POOLED = {
    "math": "rollout.rewards.graders.mathematics:math",
    "choice": "rollout.rewards.graders.text:choice",
    "format": "rollout.rewards.graders.shape:Format",
    "ifeval": "rollout.rewards.graders.ifeval:ifeval",
}
# failures that are logged one by one; all are counted
MAX_WARNINGS = 20


@dataclass
class FailureCounts:
    """How many samples were scored, and how many of them got no score."""

    errors: int = 0
    timeouts: int = 0
    samples: int = 0


@dataclass
class Tried:
    """How a part has fared since the last check."""

    asked: int = 0
    failed: int = 0
    first: str = ""  # the first failure, with its prompt


class Scorer:
    """Fills in `reward`, `reward_parts` and, where a part says right or wrong, `correct`.

    That is `metadata["correct"]`. A sample of which any part failed gets `reward.on_error`, and
    `metadata["reward_error"]` says why. `metadata["reward_info"]` has what parts tell of a sample.
    """

    def __init__(self, config: RewardConfig, parts: Mapping[str, RewardPart]) -> None:
        self._config = config
        self._parts = dict(parts)
        self._by_source = PartsBySource(config)
        # a failure of these counts as wrong: left out, it would make accuracy look better
        self._verifiers = {
            name
            for name, part in config.parts.items()
            if part.function in GRADERS and GRADERS[part.function].verifies
        }
        self._warnings = 0
        self._tried = {name: Tried() for name in self._parts}
        self._unchecked = {"step", "evaluation"}

    async def start(self) -> None:
        """Start all parts."""
        await asyncio.gather(*(part.start() for part in self._parts.values()))

    async def score(self, samples: Sequence[Sample]) -> FailureCounts:
        """Score `samples` in place; returns how many failed."""
        scores: list[dict[str, Score]] = [{} for _ in samples]
        chosen = [self._chosen(sample, found) for sample, found in zip(samples, scores)]

        rows = {name: [at for at, of in enumerate(chosen) if name in of] for name in self._parts}
        columns = await asyncio.gather(
            *(part.score([samples[at] for at in rows[name]]) for name, part in self._parts.items())
        )
        for (name, asked), column in zip(rows.items(), columns, strict=True):
            for at, score in zip(asked, column, strict=True):
                scores[at][name] = score
        counts = FailureCounts(samples=len(samples))
        for sample, found in zip(samples, scores):
            self._note(sample, found)
            self._settle(sample, found, counts)
        return counts

    def _chosen(self, sample: Sample, found: dict[str, Score]) -> tuple[str, ...]:
        try:
            return self._by_source.of(sample.metadata)
        except DataError as error:  # a workflow may have changed the metadata
            found["reward.by"] = RewardFailure("error", str(error))
            return ()

    def _note(self, sample: Sample, scores: Mapping[str, Score]) -> None:
        for name, score in scores.items():
            tried = self._tried.setdefault(name, Tried())
            tried.asked += 1
            if isinstance(score, RewardFailure):
                tried.failed += 1
                tried.first = tried.first or f"{sample.prompt_id}: {score.reason}"

    def check_works(self, kind: str, where: str) -> None:
        """Refuse a part that failed on every sample of the first step or evaluation.

        Args:
            kind: "step" or "evaluation"; only the first of each is checked.
            where: for the message, as "step 1".

        Raises:
            EmptyBatch: names the part, and file and line of its first failure.
        """
        if kind not in self._unchecked:
            return
        self._unchecked.remove(kind)
        for name, tried in self._tried.items():
            if tried.asked and tried.failed == tried.asked:
                part = self._config.parts.get(name)
                function = f" ({part.function})" if part and part.function else ""
                raise EmptyBatch(
                    f"reward.parts.{name}{function} failed on all {tried.asked} samples of {where},"
                    f" so there is nothing to learn from; the first: {tried.first}"
                )
        self._tried = {name: Tried() for name in self._parts}

    def _settle(self, sample: Sample, scores: Mapping[str, Score], counts: FailureCounts) -> None:
        verdicts = {name: score for name, score in scores.items() if isinstance(score, Verdict)}
        failures = {
            name: score for name, score in scores.items() if isinstance(score, RewardFailure)
        }
        self._record(sample, verdicts, failures)
        total = checked(
            sum(self._config.parts[name].weight * v.score for name, v in verdicts.items())
        )
        if isinstance(total, RewardFailure):
            failures["the weighted sum"] = total
        else:
            sample.reward = total.score
        if failures:
            sample.reward = self._config.on_error
            sample.metadata["reward_error"] = "; ".join(
                f"{name}: {f.reason}" for name, f in failures.items()
            )
            timed_out = any(failure.kind == "timeout" for failure in failures.values())
            counts.timeouts += timed_out
            counts.errors += not timed_out
            self._warn(sample)
        if self._config.non_stop_penalty is not None and sample.finish_reason == "length":
            sample.reward = self._config.non_stop_penalty

    def _record(
        self,
        sample: Sample,
        verdicts: Mapping[str, Verdict],
        failures: Mapping[str, RewardFailure],
    ) -> None:
        sample.reward_parts = {name: verdict.score for name, verdict in verdicts.items()}
        for name, verdict in verdicts.items():
            sample.reward_parts |= {f"{name}.{key}": part for key, part in verdict.parts.items()}
        info = {name: dict(verdict.info) for name, verdict in verdicts.items() if verdict.info}
        if info:
            sample.metadata["reward_info"] = info
        said = [verdict.correct for verdict in verdicts.values() if verdict.correct is not None]
        said += [False for name in failures if name in self._verifiers]
        if said:
            sample.metadata["correct"] = all(said)

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


def build_scorer(
    config: RewardConfig,
    *,
    vocab_size: int,
    device: str | None = None,
    max_new_tokens: int | None = None,
) -> Scorer:
    """The scorer with every part of `config`; nothing is started yet.

    Args:
        vocab_size: the policy's; a reward model must have the same.
        device: for reward models that do not set their own.
        max_new_tokens: of the responses to score, for `overlong`.

    Raises:
        ConfigError: an unknown function, wrong arguments, or no parts.
        ModelError: a reward model that cannot be used.
    """
    if not config.parts:
        raise ConfigError("reward.parts is empty; name at least one part")
    functions: dict[str, tuple[str, dict[str, Any]]] = {}
    limits = WorkerLimits(config.memory_gb, config.environment)
    pool = RewardPool(functions, config.workers, config.timeout_s, limits)
    sandbox: Sandbox | None = None  # one for all parts
    parts: dict[str, RewardPart] = {}
    for name, part in config.parts.items():
        function = str(part.function)
        args = grader_arguments(name, function, part.args, max_new_tokens)
        if part.model is not None:
            from rollout.rewards.model import ModelPart  # torch and transformers

            parts[name] = ModelPart(name, part.model, vocab_size=vocab_size, device=device)
        elif function == "code":
            sandbox = sandbox or build_sandbox(config.sandbox)
            parts[name] = CodePart(sandbox, **args)
        elif part.service is not None:
            parts[name] = ServicePart(name, part.service)
        elif part.judge is not None:
            parts[name] = JudgePart(name, part.judge)
        elif function in LOCAL:
            parts[name] = LocalPart(partial(LOCAL[function], **args))
        else:
            functions[name] = (_import_path(name, function), args)
            parts[name] = PooledPart(name, pool)
    return Scorer(config, parts)


def grader_arguments(
    part: str, function: str, args: dict[str, Any], max_new_tokens: int | None
) -> dict[str, Any]:
    """The arguments of a built-in grader with their defaults; those of others as they are.

    Raises ConfigError where the grader does not take them.
    """
    if function not in GRADERS:
        return dict(args)
    try:
        found = GRADERS[function].model_validate(args).model_dump()
    except ValidationError as error:
        reason = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"reward.parts.{part}.args: {reason}") from error
    if function == "overlong":
        found["max_tokens"] = found["max_tokens"] or max_new_tokens
        if found["max_tokens"] is None or found["buffer"] > found["max_tokens"]:
            raise ConfigError(
                f"reward.parts.{part}.args.buffer: got {found['buffer']}, expected at most the"
                f" limit of {found['max_tokens']} tokens (args.max_tokens, or"
                " rollout.sampling.max_new_tokens)"
            )
    return found


def _import_path(part: str, function: str) -> str:
    if function in POOLED:
        return POOLED[function]
    if ":" not in function:
        raise ConfigError(
            f"reward.parts.{part}.function: {function!r} is unknown; known: {', '.join(GRADERS)},"
            " or package.module:function"
        )
    return function
