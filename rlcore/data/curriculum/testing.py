"""A contract test that the author of a curriculum runs on it.

from rlcore.data.curriculum.testing import check_curriculum
print(check_curriculum("my_package.prompts:MyCurriculum", target=0.3))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from rlcore.algorithms.testing.contract import ContractError, ContractReport, Rule
from rlcore.data.curriculum.plugin import GuardedCurriculum, build_curriculum, guard_curriculum
from rlcore.data.curriculum.results import Outcome, PromptHistory, Results

Weights = NDArray[np.float64]


def check_curriculum(
    curriculum: str | Callable[..., Any],
    *,
    seed: int = 0,
    uses_order: bool = False,
    leaves_out: bool = False,
    **keywords: Any,
) -> ContractReport:
    """Try a curriculum against every rule that a run takes for granted.

    Args:
        curriculum: a registered name, an import path `package.module:Name`, a class, or an instance
            or a function that takes a history.
        seed: of the histories.
        uses_order: it means to look at where a prompt stands in the data. Leaves out `order`.
        leaves_out: it means to give prompts the weight 0. Leaves out `reachable`.
        **keywords: of its constructor.

    Raises:
        ContractError: a rule is broken. The message names it, with the history, what came, and what
            to do.
        AlgorithmError: the curriculum cannot be built from these keywords.
    """
    builds = isinstance(curriculum, str | type)
    if keywords and not builds:
        raise TypeError(f"{', '.join(keywords)}: the curriculum is built already; pass its class")

    def build() -> GuardedCurriculum:
        return build_curriculum(curriculum, **keywords) if builds else guard_curriculum(curriculum)  # type: ignore[arg-type]

    subject = _Subject(build(), build, seed)
    skipped = {}
    if uses_order:
        skipped[ORDER] = "uses_order=True"
    if leaves_out:
        skipped[REACHABLE] = "leaves_out=True"
    if not builds:
        skipped[STATELESS] = "an instance is not built anew: pass the class"
    kept = [rule for rule in _RULES if rule not in skipped]
    for rule in kept:
        _RULES[rule](subject)
    return ContractReport(subject.name, tuple(kept), skipped)


WEIGHTS = Rule(
    "weights",
    "the result is an array [N] of finite numbers >= 0 whose sum is above 0",
    "pass rates are NaN where nothing is known: give those prompts a number of their own",
)
READ_ONLY = Rule(
    "read-only", "the history is read, never written", "compute out of place, or write into a copy"
)
DETERMINISTIC = Rule(
    "deterministic",
    "the same history gives the same weights, to the bit, whatever was asked in between",
    "draw no random numbers and keep no state: the draw is random already",
)
STATELESS = Rule(
    "stateless",
    "a new instance gives the same weights: a resumed run has one",
    "compute everything from the history",
)
ORDER = Rule(
    "order",
    "prompts in another order get the same weights in that order",
    "nothing may depend on where a prompt stands, or pass uses_order=True",
)
REACHABLE = Rule(
    "reachable",
    "every prompt has a weight above 0, since one that is never drawn never changes",
    "add a small number to all weights, or pass leaves_out=True",
)


@dataclass(frozen=True)
class _Subject:
    guarded: GuardedCurriculum
    build: Callable[[], GuardedCurriculum]
    seed: int

    @property
    def name(self) -> str:
        return f"curriculum {self.guarded.name!r}"

    def weights(
        self, rule: Rule, what: str, history: PromptHistory, of: GuardedCurriculum | None = None
    ) -> Weights:
        """Ask for the weights; whatever is raised breaks the rule."""
        try:
            return (of or self.guarded)(history)
        except Exception as error:  # noqa: BLE001  (anything at all that a plugin raises breaks the rule)
            written = "read-only" in str(error)
            self.fail(READ_ONLY if written else rule, what, history, str(error), error)

    def same(
        self, rule: Rule, what: str, history: PromptHistory, expected: Weights, got: Weights
    ) -> None:
        """Fail unless both are equal, up to rounding for rule `order`."""
        limit = 1e-12 * expected.max() if rule is ORDER else 0.0
        apart = np.flatnonzero(~(np.abs(expected - got) <= limit))
        if len(apart):
            at = int(apart[0])
            finding = f"weight of prompt {at}: expected {expected[at]:.17g}, got {got[at]:.17g}"
            self.fail(rule, what, history, finding)

    def fail(
        self,
        rule: Rule,
        what: str,
        history: PromptHistory,
        finding: str,
        cause: Exception | None = None,
    ) -> NoReturn:
        rates = ", ".join(f"{rate:.3g}" for rate in history.pass_rate[:8])
        more = ", ..." if len(history) > 8 else ""
        example = f"{what}, of {len(history)} prompts with pass rates [{rates}{more}]\n{finding}"
        raise ContractError(self.name, rule, example) from cause


def _histories(seed: int) -> Iterator[tuple[str, PromptHistory]]:
    """Yield histories, simplest first, with what they are."""
    random = np.random.default_rng(seed)
    for size in (1, 3, 40):
        yield "a run that begins", _history(size, [])
    all_right = [(row, Outcome(4, 4)) for row in range(5)]
    yield "every prompt solved", _history(5, all_right)
    yield "no prompt solved", _history(5, [(row, Outcome(0, 4)) for row, _ in all_right])
    yield "groups that tell nothing", _history(5, [(row, Outcome(0, 0)) for row, _ in all_right])
    yield "groups that failed", _history(5, all_right[:3], failed=[0, 0, 4])
    yield "one prompt of which much is known", _history(1, [(0, Outcome(1, 2))] * 50)
    for size, count in ((7, 5), (7, 40), (200, 1000)):
        told = random.integers(0, 9, count)
        right = random.integers(0, told + 1)
        rows = random.integers(0, size, count)
        results = [(int(r), Outcome(int(a), int(b))) for r, a, b in zip(rows, right, told)]
        yield f"{count} random results", _history(size, results)


def _history(
    size: int, results: list[tuple[int, Outcome]], failed: Sequence[int] = ()
) -> PromptHistory:
    folded = Results(size, memory=0.5)
    for row, outcome in results:
        folded.add(row, outcome)
    for row in failed:
        folded.add_failure(row)
    lengths = 10 + np.arange(size) * 37 % 11
    sources = np.arange(size) % 2
    for array in (lengths, sources):
        array.flags.writeable = False
    return folded.history(lengths, sources, ("a", "b"))


def _reordered(history: PromptHistory, order: NDArray[np.int64]) -> PromptHistory:
    arrays = {
        field.name: getattr(history, field.name)[order]
        for field in fields(history)
        if isinstance(getattr(history, field.name), np.ndarray)
    }
    for array in arrays.values():
        array.flags.writeable = False
    return replace(history, **arrays)


def _check_weights(subject: _Subject) -> None:
    for what, history in _histories(subject.seed):
        subject.weights(WEIGHTS, what, history)


def _check_deterministic(subject: _Subject) -> None:
    for what, history in _histories(subject.seed):
        expected = subject.weights(DETERMINISTIC, what, history)
        for _, other in _histories(subject.seed + 1):
            subject.weights(DETERMINISTIC, what, other)
        again = subject.weights(DETERMINISTIC, what, history)
        subject.same(DETERMINISTIC, f"{what}, asked again", history, expected, again)


def _check_stateless(subject: _Subject) -> None:
    for what, history in _histories(subject.seed):
        expected = subject.weights(STATELESS, what, history)
        anew = subject.weights(STATELESS, what, history, of=subject.build())
        subject.same(STATELESS, f"{what}, a new instance", history, expected, anew)


def _check_order(subject: _Subject) -> None:
    for what, history in _histories(subject.seed):
        order = np.random.default_rng(subject.seed).permutation(len(history))
        expected = subject.weights(ORDER, what, history)[order]
        moved = _reordered(history, order)
        got = subject.weights(ORDER, what, moved)
        subject.same(ORDER, f"{what}, in another order", moved, expected, got)


def _check_reachable(subject: _Subject) -> None:
    for what, history in _histories(subject.seed):
        weights = subject.weights(REACHABLE, what, history)
        if not weights.all():
            at = int(np.flatnonzero(weights == 0)[0])
            subject.fail(REACHABLE, what, history, f"prompt {at} has the weight 0")


_RULES: Mapping[Rule, Callable[[_Subject], None]] = {
    WEIGHTS: _check_weights,
    READ_ONLY: _check_weights,  # any call may find a write
    DETERMINISTIC: _check_deterministic,
    STATELESS: _check_stateless,
    ORDER: _check_order,
    REACHABLE: _check_reachable,
}
