"""The common types of reward parts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, Literal, TypeVar

import numpy as np
import orjson

from rlcore.data.sample import Sample
from rlcore.errors import RlcoreError

T = TypeVar("T")
# Rewards are float32 in a batch: larger values would become infinite.
MAX_SCORE = float(np.finfo(np.float32).max)
MAX_INFO = 1 << 16  # bytes of `info` as JSON, since it is recorded with each sample
KEYS = ("score", "correct", "parts", "info")
OUTCOME = "reward"  # name of a workflow's outcome that is a single number


@dataclass(frozen=True)
class Verdict:
    """A reward part's verdict on a sample."""

    score: float
    correct: bool | None = None  # None: the part does not judge right or wrong
    parts: Mapping[str, float] = field(default_factory=dict)  # components of the score
    info: Mapping[str, Any] = field(default_factory=dict)  # JSON-able data to record


@dataclass(frozen=True)
class RewardFailure:
    """The reason for which a call gave no score."""

    kind: Literal["error", "timeout"]
    reason: str
    place: str = ""  # ` (file:line in name)` of a user's function
    external: bool = False  # not caused by the answer: a label, a sandbox, a failed worker start

    def __post_init__(self) -> None:
        # the reason is logged and recorded, so it must be encodable
        object.__setattr__(self, "reason", readable(self.reason))

    def __str__(self) -> str:
        return self.reason + self.place


def readable(text: str) -> str:
    """Make text encodable: replace lone surrogates by question marks."""
    return text.encode("utf-8", "replace").decode()


class LabelError(ValueError):
    """A label that a grader cannot read, so that no answer can be judged."""


Score = Verdict | RewardFailure


class RewardPart:
    """One named part of the reward.

    A failure is a value rather than an exception, since it concerns a single sample.
    """

    records_samples = False  # whether the part records each sample in the timeline itself

    async def start(self) -> None:
        """Prepare to score."""

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """The score or failure of each sample."""
        raise NotImplementedError

    async def close(self) -> None:
        """Release what `start` acquired."""


class LocalPart(RewardPart):
    """A part that the event loop scores itself, with a fast built-in grader."""

    def __init__(self, grader: Callable[[Sample], Score]) -> None:
        self._grader = grader

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        return [attempt(partial(self._grader, sample)) for sample in samples]


def workflow_outcome(name: str, sample: Sample) -> Score:
    """The workflow's outcome for a part: the number under its name, otherwise its only number.

    An outcome `correct` gives the verdict.
    """
    outcome = sample.outcome
    if name not in outcome and OUTCOME not in outcome:
        given = ", ".join(outcome) or "none"
        return RewardFailure(
            "error",
            f"the workflow gave no reward {name!r} (it gave: {given}): return it from the"
            " environment's reward(), or from the agent program",
        )
    found = checked(outcome.get(name, outcome.get(OUTCOME)))
    if isinstance(found, Verdict) and "correct" in outcome:
        return Verdict(found.score, bool(outcome["correct"]))
    return found


# --- failures -------------------------------------------------------------------------------------


async def each(
    samples: Sequence[Sample], score: Callable[[Sample], Awaitable[Score]]
) -> list[Score]:
    """Score the samples concurrently; an exception becomes the failure of its sample."""
    return list(await asyncio.gather(*(attempted(score(sample)) for sample in samples)))


async def attempted(work: Awaitable[T]) -> T | RewardFailure:
    """The result of `work`, or the failure for its exception.

    SystemExit and KeyboardInterrupt are caught here, since asyncio would let them out of the task
    and the loop. That loop runs next to the main thread, which alone receives Ctrl-C.
    """
    try:
        return await work
    except GeneratorExit:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # raised by code that was called, not a cancellation of this task
        return failed(error)
    except BaseException as error:  # noqa: BLE001 - recovery: no grader ends a run
        return failed(error)


def attempt(call: Callable[[], T]) -> T | RewardFailure:
    """The result of `call`, or the failure for its exception."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 - recovery: no grader ends a run
        return failed(error)


def failed(error: BaseException) -> RewardFailure:
    """The failure for a grader's exception, even if the exception's own methods raise."""
    try:
        text = " ".join(str(error).split())[:200]
    except BaseException as another:  # noqa: BLE001 - recovery: the name of its type is enough
        text = f"its text is unavailable, since that raised {type(another).__name__}"
    external = isinstance(error, LabelError | RlcoreError)
    return RewardFailure("error", f"raised {type(error).__name__}: {text}", external=external)


# --- return values --------------------------------------------------------------------------------


def checked(value: Any) -> Score:
    """Validate a reward function's return value.

    Args:
        value: a finite number, or a mapping with `score`; `correct`, `parts` and `info` are
            optional.
    """
    try:
        return _verdict(value) if isinstance(value, Mapping) else Verdict(_number(value))
    except ValueError as error:
        return RewardFailure("error", f"returned {error}")


def _number(value: Any) -> float:
    if not isinstance(value, Real | np.bool_):
        raise ValueError(f"{type(value).__name__} {str(value)[:80]!r}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not abs(number) <= MAX_SCORE:
        raise ValueError(
            f"{number}, expected a finite number (of float32: at most {MAX_SCORE:.3g})"
        )
    return number


def _verdict(value: Mapping[Any, Any]) -> Verdict:
    unknown = [str(key)[:40] for key in value if key not in KEYS]
    if unknown or "score" not in value:
        wrong = f"with the unknown key {unknown[0]!r}" if unknown else "without 'score'"
        raise ValueError(
            f"a mapping {wrong}; its keys are {', '.join(KEYS)}, of which `score` is needed"
        )
    correct = value.get("correct")
    if not isinstance(correct, bool | np.bool_ | None):
        raise ValueError(f"correct: {str(correct)[:80]!r}, expected True, False or None")
    parts = value.get("parts") or {}
    info = value.get("info") or {}
    for name, given in (("parts", parts), ("info", info)):
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise ValueError(f"{name}: {str(given)[:80]!r}, expected a mapping by names")
    try:
        # plain values, which can be recorded as JSON
        plain = orjson.dumps([list(parts), dict(info)])
    except orjson.JSONEncodeError as error:
        raise ValueError(f"info that is not JSON: {str(error)[:80]}") from error
    if len(plain) > MAX_INFO:
        raise ValueError(f"info of {len(plain)} bytes as JSON, expected at most {MAX_INFO}")
    return Verdict(
        _number(value["score"]),
        None if correct is None else bool(correct),
        {name: _number(number) for name, number in parts.items()},
        orjson.loads(plain)[1],
    )
