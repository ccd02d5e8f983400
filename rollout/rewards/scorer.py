"""Sums the weighted parts of a reward, and handles samples for which a part fails.

`build_scorer` builds the parts from the configuration.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from rlcore.config.sections.graders import GRADERS
from rlcore.config.sections.reward import RewardConfig
from rlcore.data.sample import Sample
from rlcore.errors import DataError
from rlcore.timeline.recorder import TrackAllocator, of_group
from rollout.failures import Failure
from rollout.rewards.base import (
    LocalPart,
    RewardFailure,
    RewardPart,
    Score,
    Verdict,
    attempted,
    checked,
    workflow_outcome,
)
from rollout.rewards.graders import text
from rollout.rewards.graders.code import CodePart
from rollout.rewards.pool import PooledPart, RewardPool
from rollout.rewards.services import JudgePart, ServicePart
from rollout.sandbox import Sandbox
from rollout.sandbox.local import build_sandbox

logger = logging.getLogger(__name__)

# fast graders, which no response can make slow
LOCAL: dict[str, Callable[..., Verdict]] = {
    "exact_match": text.exact_match,
    "f1": text.f1,
    "overlong": text.overlong,
}
# graders that worker processes import, by import path
POOLED = {
    "math": "rollout.rewards.graders.mathematics:math",
    "choice": "rollout.rewards.graders.text:choice",
    "format": "rollout.rewards.graders.text:Format",
    "ifeval": "rollout.rewards.graders.ifeval:ifeval",
    "reasoning_gym": "rollout.rewards.graders.reasoning_gym:ReasoningGym",
}
# keys of `Sample.metadata` that only the scorer sets
VERDICTS = ("correct", "reward_error", "reward_info")
MAX_CAUSES = 20  # causes of failures that are logged; further causes are only counted
# finish reasons with an incomplete answer, for `non_stop_penalty`
UNFINISHED = frozenset({"length", "context", "turns", "timeout"})


@dataclass
class FailureCounts:
    """Counts of scored samples and of samples on which a part failed, and the unscored samples.

    If an answer makes a built-in grader fail, the answer is wrong, so its sample has a score.
    """

    samples: int = 0
    errors: int = 0
    timeouts: int = 0
    unscored: list[Failure] = field(default_factory=list)  # one for each unscored sample

    @property
    def failed(self) -> int:
        """Number of samples on which a part failed."""
        return self.errors + self.timeouts

    def add(self, other: FailureCounts) -> None:
        """Add the counts of further samples."""
        self.samples += other.samples
        self.errors += other.errors
        self.timeouts += other.timeouts
        self.unscored += other.unscored


class PartsBySource:
    """Maps rows to the parts that score them. A part without `sources` scores every row."""

    def __init__(self, config: RewardConfig) -> None:
        self._by = config.by
        self._sources = {name: part.sources for name, part in config.parts.items()}
        self._chosen: dict[tuple[str, ...], tuple[str, ...]] = {(): tuple(config.parts)}

    def of(self, row: Mapping[str, Any]) -> tuple[str, ...]:
        """The names of the parts that score `row`.

        Raises:
            DataError: the row's value at `reward.by` is missing, or in no part's `sources`.
        """
        values = () if self._by is None else self._values(row, self._by)
        if values not in self._chosen:
            known = {one for sources in self._sources.values() for one in sources or ()}
            for value in values:
                if not _matches(value, known):
                    raise DataError(
                        f"no reward part scores the source {value!r} (reward.by: {self._by}); known"
                        f" are {', '.join(sorted(known))}; add it to the `sources` of a part"
                    )
            self._chosen[values] = tuple(
                name
                for name, sources in self._sources.items()
                if sources is None or any(_matches(value, sources) for value in values)
            )
        return self._chosen[values]

    def _values(self, row: Mapping[str, Any], by: str) -> tuple[str, ...]:
        found: Any = row
        for key in [by] if by in row else by.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        # open-instruct's `dataset` may be a list of verifiers
        values = tuple(found) if isinstance(found, list | tuple) else (found,)
        if not values or not all(isinstance(value, str | int) for value in values):
            raise DataError(
                f"the row has no text or list of texts at {by!r} (reward.by), got {found!r}; it has"
                f" the columns {', '.join(row) or 'none'}"
            )
        return tuple(str(value) for value in values)


def _matches(value: str, sources: Iterable[str]) -> bool:
    return any(fnmatchcase(value, pattern) for pattern in sources)


class Scorer:
    """Fills in `reward`, `reward_parts` and, if a part gives a verdict, `metadata["correct"]`.

    If a part failed, `metadata["reward_error"]` has the reason, and the sample gets
    `reward.on_error`. With `drop` its reward is NaN, unless the answer made a built-in grader fail:
    then that part scores 0. `metadata["reward_info"]` has the parts' reports about a sample.
    """

    def __init__(
        self, config: RewardConfig, parts: Mapping[str, RewardPart], *, max_causes: int = MAX_CAUSES
    ) -> None:
        self._config = config
        self._parts = dict(parts)
        self._max_causes = max_causes
        self._by_source = PartsBySource(config)
        # Scores of built-in graders for answers that make them fail. Dropping hard-to-check answers
        # would inflate the accuracy.
        self._found_wrong = {
            name: Verdict(0.0, False if GRADERS[part.function].verifies else None)
            for name, part in config.parts.items()
            if part.function in GRADERS
        }
        # timeline tracks for parts without workers
        self._tracks = TrackAllocator("rewards", "call")
        self._causes: Counter[Hashable] = Counter()

    def only(self, names: Iterable[str]) -> Scorer:
        """A scorer with some of these very parts, which logs no failures."""
        parts = {name: self._parts[name] for name in names}
        return Scorer(self._config, parts, max_causes=0)

    async def start(self) -> None:
        """Start all parts."""
        await asyncio.gather(*(part.start() for part in self._parts.values()))

    async def score(
        self, samples: Sequence[Sample], greedy: Sequence[Sample] = ()
    ) -> FailureCounts:
        """Score all samples in place; return the counts of failures.

        The samples of a conversation are scored once, by the last of them.

        Args:
            greedy: the baseline's samples, whose rollout ids equal those of other samples.
        """
        rollouts: dict[Hashable, list[Sample]] = {}
        for kind, given in (("training", samples), ("greedy", greedy)):
            for sample in given:
                together = sample.rollout_id if sample.turn_spans else id(sample)
                rollouts.setdefault((kind, together), []).append(sample)
        scored = []
        for parts in rollouts.values():
            last = parts[-1]
            if len(parts) > 1:
                # the last sample, with the measurements of the whole conversation
                measured = {key: value for part in parts for key, value in part.measured.items()}
                last = replace(last, measured=measured, metadata=dict(last.metadata))
            scored.append(last)
        counts = await self._score_each(scored)
        for one, parts in zip(scored, rollouts.values()):
            verdict = {key: one.metadata[key] for key in VERDICTS if key in one.metadata}
            for sample in parts:
                if sample is not one:
                    _forget_verdicts(sample)
                    sample.reward = one.reward
                    sample.reward_parts = dict(one.reward_parts)
                    sample.metadata |= verdict
        return counts

    async def _score_each(self, samples: Sequence[Sample]) -> FailureCounts:
        scores: list[dict[str, Score]] = [{} for _ in samples]
        rows: dict[str, list[int]] = {name: [] for name in self._parts}
        for at, sample in enumerate(samples):
            try:
                for name in self._parts.keys() & self._by_source.of(sample.metadata):
                    rows[name].append(at)
            except DataError as error:
                # a workflow may have changed the metadata
                scores[at]["reward.by"] = RewardFailure("error", str(error), external=True)
        columns = await asyncio.gather(
            *(self._scored_by(name, [samples[at] for at in asked]) for name, asked in rows.items())
        )
        for (name, asked), column in zip(rows.items(), columns, strict=True):
            for at, score in zip(asked, column, strict=True):
                scores[at][name] = score
        counts = FailureCounts(samples=len(samples))
        for sample, found in zip(samples, scores):
            self._combine(sample, found, counts)
        return counts

    async def _scored_by(self, name: str, samples: Sequence[Sample]) -> list[Score]:
        """The scores of one part, whose call is recorded in the timeline."""
        part = self._parts[name]
        if not samples:
            return []
        span = self._tracks.span(name, samples=len(samples), **of_group())
        with nullcontext() if part.records_samples else span:
            found = await attempted(part.score(samples))
        return [found] * len(samples) if isinstance(found, RewardFailure) else found

    def _combine(self, sample: Sample, scores: Mapping[str, Score], counts: FailureCounts) -> None:
        _forget_verdicts(sample)
        on_error = self._config.on_error
        verdicts: dict[str, Verdict] = {}
        failures: dict[str, RewardFailure] = {}
        wrong: dict[str, Verdict] = {}
        for name, score in scores.items():
            if isinstance(score, Verdict):
                verdicts[name] = score
                continue
            failures[name] = score
            if name in self._found_wrong and not score.external:
                wrong[name] = self._found_wrong[name]
        if on_error == "drop":
            verdicts |= wrong
        total = checked(
            sum(self._config.parts[name].weight * v.score for name, v in verdicts.items())
        )
        if isinstance(total, RewardFailure):
            failures["the weighted sum"] = total
        else:
            sample.reward = total.score
        without_score = [name for name in failures if name not in wrong]
        dropped = bool(without_score) and on_error == "drop"
        self._record(sample, verdicts, () if dropped else failures)
        if failures:
            if on_error != "drop":
                sample.reward = on_error
            elif dropped:
                sample.reward = math.nan
                sample.metadata.pop("correct", None)
            sample.metadata["reward_error"] = "; ".join(
                f"{name}: {failure}" for name, failure in failures.items()
            )
            timed_out = any(failure.kind == "timeout" for failure in failures.values())
            counts.timeouts += timed_out
            counts.errors += not timed_out
            name = next(iter(without_score or failures))
            failure = self._failure(sample, name, failures[name])
            if without_score:
                counts.unscored.append(failure)
            self._warn(failure, "left out" if dropped else f"scored {sample.reward:g}")
        if self._config.non_stop_penalty is not None and sample.finish_reason in UNFINISHED:
            sample.reward = self._config.non_stop_penalty

    def _record(
        self, sample: Sample, verdicts: Mapping[str, Verdict], failures: Iterable[str]
    ) -> None:
        sample.reward_parts = {name: verdict.score for name, verdict in verdicts.items()}
        for name, verdict in verdicts.items():
            sample.reward_parts |= {f"{name}.{key}": part for key, part in verdict.parts.items()}
        info = {name: dict(verdict.info) for name, verdict in verdicts.items() if verdict.info}
        if info:
            sample.metadata["reward_info"] = info
        said = [verdict.correct for verdict in verdicts.values() if verdict.correct is not None]
        verifiers = {name for name, found in self._found_wrong.items() if found.correct is False}
        said += [False for name in failures if name in verifiers]
        if said:
            sample.metadata["correct"] = all(said)

    def _failure(self, sample: Sample, name: str, failure: RewardFailure) -> Failure:
        part = self._config.parts.get(name)
        function = f" ({part.function})" if part and part.function else ""
        what = f"reward.parts.{name}{function}" if part else name
        where = f"sample {sample.index} of draw {sample.draw} ({sample.prompt_id})"
        return Failure(failure.kind, what, where, failure.reason, failure.place)

    def _warn(self, failure: Failure, outcome: str) -> None:
        """Log the first, tenth, hundredth, ... failure with the same cause."""
        if failure.alike not in self._causes and len(self._causes) == self._max_causes:
            return
        self._causes[failure.alike] += 1
        count = self._causes[failure.alike]
        if str(count).strip("0") == "1":
            logger.warning(
                "%s; %s (reward.on_error: %s)%s",
                failure,
                outcome,
                self._config.on_error,
                "; more such failures are only counted" if count == 1 else f"; {count} so far",
            )

    async def close(self) -> None:
        """Close all parts."""
        await asyncio.gather(*(part.close() for part in self._parts.values()))


def _forget_verdicts(sample: Sample) -> None:
    """Remove data columns that have the name of a verdict."""
    for key in VERDICTS:
        sample.metadata.pop(key, None)


# --- construction ---------------------------------------------------------------------------------


def build_scorer(config: RewardConfig, *, max_new_tokens: int | None = None) -> Scorer:
    """Build the scorer with every part of `config`, without starting anything.

    Args:
        max_new_tokens: limit of the responses to score, for `overlong`.

    Raises:
        ConfigError: a key or certificate of a service or judge is missing.
        ModelError: a service's `tokenizer` cannot be used.
    """
    functions: dict[str, tuple[str, dict[str, Any]]] = {}
    limits = (config.timeout_s, config.memory_gb, config.environment)
    pool = RewardPool(functions, config.workers, *limits)
    # shared by all parts
    sandbox: Sandbox | None = None
    parts: dict[str, RewardPart] = {}
    for name, part in config.parts.items():
        function = str(part.function)
        args = grader_arguments(function, part.args, max_new_tokens)
        if function == "code":
            sandbox = sandbox or build_sandbox(config.sandbox)
            parts[name] = CodePart(sandbox, **args)
        elif part.service is not None:
            parts[name] = ServicePart(name, part.service)
        elif part.judge is not None:
            parts[name] = JudgePart(name, part.judge)
        elif part.source == "workflow":
            parts[name] = LocalPart(partial(workflow_outcome, name))
        elif function in LOCAL:
            parts[name] = LocalPart(partial(LOCAL[function], **args))
        else:
            functions[name] = (POOLED.get(function, function), args)
            parts[name] = PooledPart(name, pool)
    return Scorer(config, parts)


def grader_arguments(
    function: str, args: dict[str, Any], max_new_tokens: int | None
) -> dict[str, Any]:
    """The arguments of a built-in grader with their defaults; those of other graders unchanged."""
    if function not in GRADERS:
        return dict(args)
    found = GRADERS[function].model_validate(args).model_dump()
    if function == "overlong":
        found["max_tokens"] = found["max_tokens"] or max_new_tokens
    return found
