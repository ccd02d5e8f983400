"""The results of prompts so far, and the weights that a curriculum gives them."""

from __future__ import annotations

import base64
import functools
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rlcore.algorithms.errors import UnknownNameError, known_names
from rlcore.algorithms.plugins import Keyword, check_keywords, constructor_keywords, import_plugin
from rlcore.data.sample import Sample
from rlcore.errors import RunFailed
from rlcore.import_paths import location_of

CHUNK = 1024  # results that a snapshot packs into one text


class Outcome(NamedTuple):
    """The results of a group's rollouts; as text, "3/8", it stands in the ledger's journal."""

    right: int  # rollouts that pass
    judged: int  # rollouts with a known result

    def __str__(self) -> str:
        return f"{self.right}/{self.judged}"

    @classmethod
    def of(cls, samples: Sequence[Sample], passes_at: float | None) -> Outcome:
        """Count the rollouts of a group. All samples of a rollout have its reward.

        Args:
            passes_at: the reward from which a rollout passes. None: the verdict of its reward
                decides, and a rollout without a verdict is left out.

        A rollout whose reward failed is left out, since that says nothing about its prompt.
        """
        rollouts = {sample.rollout_id: sample for sample in samples}.values()
        scored = [sample for sample in rollouts if "reward_error" not in sample.metadata]
        if passes_at is not None:
            said = [sample.reward >= passes_at for sample in scored]
        else:
            said = [sample.verdict for sample in scored if sample.verdict is not None]
        return cls(sum(said), len(said))


@dataclass(frozen=True)
class PromptHistory:
    """The data that a curriculum may use, for each of N prompts; arrays are read-only.

    `right` and `judged` count rollouts: each new group of a prompt adds its counts to `memory`
    times the previous ones (`data.curriculum.memory`). With memory 0 they count the newest group
    alone.
    """

    seen: NDArray[np.int64]  # [N] finished groups
    right: NDArray[np.float64]  # [N] recent rollouts that pass
    judged: NDArray[np.float64]  # [N] recent rollouts with a known result
    last: NDArray[np.int64]  # [N] number of the newest result among all results; -1: none
    failed: NDArray[np.int64]  # [N] groups that failed since the newest finished one
    results: int  # finished groups of all prompts
    lengths: NDArray[np.int64]  # [N] tokens of each prompt
    sources: NDArray[np.int64]  # [N] index into `source_names`; 0 without sources
    source_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.seen)

    @property
    def pass_rate(self) -> NDArray[np.float64]:
        """The share of recent rollouts that pass, [N]; NaN without a known result."""
        known = self.judged > 0
        return np.divide(self.right, self.judged, out=np.full(len(self), np.nan), where=known)


class Results:
    """All results of a run, in order, and the sums that a `PromptHistory` shows.

    The log is the state: its chunks are compressed, each once, and the sums follow from it.
    Failures, which are few and have no results, are kept separately.
    """

    def __init__(self, size: int, memory: float) -> None:
        self._size = size
        self._memory = memory
        self._clear()

    def _clear(self) -> None:
        self.seen = np.zeros(self._size, dtype=np.int64)
        self.right = np.zeros(self._size)
        self.judged = np.zeros(self._size)
        self.last = np.full(self._size, -1, dtype=np.int64)
        self.failed = np.zeros(self._size, dtype=np.int64)
        self.count = 0
        # The number of results with a known result.
        self.num_known = 0
        self._chunks: list[str] = []
        # [row, right, judged] of the results after the last chunk.
        self._tail: list[list[int]] = []

    def add(self, row: int, outcome: Outcome) -> None:
        """Add the result of a group of prompt `row`."""
        self._sum(row, outcome)
        self._tail.append([row, *outcome])
        if len(self._tail) == CHUNK:
            # Transposed, so that similar numbers are next to one another.
            columns = np.array(self._tail, dtype="<i4").T
            self._chunks.append(base64.b64encode(zlib.compress(columns.tobytes())).decode())
            self._tail = []

    def add_failure(self, row: int) -> None:
        """Record that a group of prompt `row` was given up, and so has no result."""
        self.failed[row] += 1

    def _sum(self, row: int, outcome: Outcome) -> None:
        self.failed[row] = 0
        self.seen[row] += 1
        self.last[row] = self.count
        self.count += 1
        if outcome.judged:
            self.num_known += 1
            self.right[row] = self._memory * self.right[row] + outcome.right
            self.judged[row] = self._memory * self.judged[row] + outcome.judged

    def history(
        self,
        lengths: NDArray[np.int64],
        sources: NDArray[np.int64],
        source_names: tuple[str, ...] = (),
    ) -> PromptHistory:
        """Return a copy of the sums, together with the properties of the prompts."""
        arrays: dict[str, Any] = {
            name: getattr(self, name).copy()
            for name in ("seen", "right", "judged", "last", "failed")
        }
        arrays |= {"lengths": lengths.copy(), "sources": sources.copy()}
        for array in arrays.values():
            array.flags.writeable = False
        return PromptHistory(results=self.count, source_names=source_names, **arrays)

    def snapshot(self) -> dict[str, Any]:
        """Return the log and the prompts whose newest groups failed, JSON-able."""
        failed = [[row, int(self.failed[row])] for row in np.flatnonzero(self.failed).tolist()]
        tail = [list(one) for one in self._tail]
        return {"chunks": list(self._chunks), "tail": tail, "failed": failed}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a snapshot by summing up its log."""
        self._clear()
        self._chunks = list(state["chunks"])
        self._tail = [list(one) for one in state["tail"]]
        results: list[list[int]] = []
        for chunk in self._chunks:
            flat = np.frombuffer(zlib.decompress(base64.b64decode(chunk)), dtype="<i4")
            results += flat.reshape(3, -1).T.tolist()
        for row, right, judged in results + self._tail:
            self._sum(row, Outcome(right, judged))
        for row, count in state["failed"]:
            self.failed[row] = count


def num_results(state: Mapping[str, Any]) -> int:
    """Return how many results a snapshot of `Results` holds."""
    return len(state["chunks"]) * CHUNK + len(state["tail"])


Weigh = Callable[[PromptHistory], NDArray[np.float64]]
"""Returns the weight of each prompt, [N]: a pure function of the history.

The probability of a prompt is its weight divided by the sum of the weights of all prompts that may
be drawn. The function has no state: a resumed run restores only the history.
"""
PASS_RATE = "pass_rate"


class PassRate:
    """Prefers prompts that the policy solves sometimes.

        weight = floor + (1 - floor) (p / t)^2t ((1 - p) / (1 - t))^2(1 - t)

    p is the recent pass rate of the prompt, t the target. With a target of 1/2 the weight is
    4 p (1 - p), four times the variance of a sample's verdict: a prompt that is always or never
    solved has groups of equal rewards, which teach nothing. A prompt without results has weight 1.
    A prompt whose newest group failed has the floor as its weight, since it may fail every time.

    Args:
        target: the preferred pass rate; below 1/2 for harder prompts.
        floor: the weight of a prompt that is always or never solved, so that it is tried again. 1
            gives all prompts the same weight.
    """

    def __init__(self, *, target: float = 0.5, floor: float = 0.1) -> None:
        if not 0.0 < target < 1.0:
            raise ValueError(f"target: expected a number between 0 and 1, got {target}")
        if not 0.0 < floor <= 1.0:
            raise ValueError(f"floor: expected a number above 0, at most 1, got {floor}")
        self.target = target
        self.floor = floor

    def __call__(self, history: PromptHistory) -> NDArray[np.float64]:
        rate = history.pass_rate
        rate = np.where(np.isnan(rate), self.target, rate)
        hits = (rate / self.target) ** (2 * self.target)
        misses = ((1 - rate) / (1 - self.target)) ** (2 * (1 - self.target))
        weights = self.floor + (1 - self.floor) * hits * misses
        return np.where(history.failed > 0, self.floor, weights)


def curriculum_keywords(name: str) -> dict[str, Keyword]:
    """Return the configuration keys of a curriculum, with the annotation and default of each.

    Raises:
        UnknownNameError: no curriculum has this name.
    """
    factory = _find(name)
    keywords = constructor_keywords(factory, f"curriculum {name!r}")
    if inspect.isfunction(factory):
        # The first parameter is the history.
        keywords.pop(next(iter(keywords), ""), None)
    return keywords


def build_curriculum(name: str, **options: Any) -> Weigh:
    """Return the function of a curriculum, with its keywords set and checked.

    Raises:
        UnknownNameError: no curriculum has this name.
        KeywordError: an unknown keyword, or a value of another type.
        ValueError: its constructor refuses a value.
    """
    check_keywords(f"curriculum {name!r}", curriculum_keywords(name), options)
    factory = _find(name)
    if inspect.isfunction(factory):
        return functools.partial(factory, **options)
    weigh: Weigh = factory(**options)
    return weigh


def _find(name: str) -> Callable[..., Any]:
    if name == PASS_RATE:
        return PassRate
    if ":" not in name:
        raise UnknownNameError(
            f"unknown curriculum {name!r}; {known_names(name, [PASS_RATE])}; one of your own is"
            " named by its import path, 'package.module:Name'"
        )
    found: Callable[..., Any] = import_plugin(name, "curriculum")
    return found


def weigh(curriculum: Weigh, history: PromptHistory) -> NDArray[np.float64]:
    """Return the weights of a curriculum, float64 [N].

    Raises:
        RunFailed: the curriculum raises, or does not return a finite weight >= 0 for each prompt
            with a positive sum.
    """
    try:
        given = curriculum(history)
    except (Exception, SystemExit) as error:
        location = location_of(curriculum, error)
        raise RunFailed(
            f"data.curriculum failed{location}: {type(error).__name__}: {error}"
        ) from error
    where = f"data.curriculum{location_of(curriculum)}"
    if not isinstance(given, np.ndarray) or given.shape != (len(history),):
        got = f"shape {given.shape}" if isinstance(given, np.ndarray) else type(given).__name__
        raise RunFailed(
            f"{where} returned {got}, expected an array [N] = [{len(history)}], a weight a prompt"
        )
    if given.dtype.kind not in "fiu":
        raise RunFailed(f"{where} returned {given.dtype}, expected numbers")
    weights = given.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(bad):
        raise RunFailed(
            f"{where} gave prompt {bad[0]} the weight {weights[bad[0]]}, expected a finite number"
            f" >= 0 ({len(bad)} of {len(weights)} prompts)"
        )
    if not 0 < float(weights.sum()) < np.inf:
        raise RunFailed(
            f"{where} returned weights with the sum {weights.sum()}, expected a finite number above"
            " 0: some prompt must be drawn"
        )
    return weights
