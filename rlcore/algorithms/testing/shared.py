"""The part of the contract that estimators and policy losses share: the subject, and most rules."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rlcore.algorithms.guard import Guarded
from rlcore.algorithms.testing.batches import (
    NEIGHBOURS,
    Layout,
    Record,
    only,
    peers,
    strided,
    take,
)
from rlcore.algorithms.testing.contract import ContractReport, Rule
from rlcore.algorithms.testing.trial import Subject, Trial, same_outputs

AnyGuarded = TypeVar("AnyGuarded", bound=Guarded)
AnySubject = TypeVar("AnySubject", bound="Subject[Any]")


def check_rules(
    subject: AnySubject,
    rules: Mapping[Rule, Callable[[AnySubject, Trial[Any]], None]],
    skipped: Mapping[Rule, str],
) -> ContractReport:
    """Try the rules in order, but not those in `skipped`, which says why."""
    kept = []
    for rule, check in rules.items():
        if rule not in skipped:
            check(subject, Trial(subject, rule))
            kept.append(rule)
    return ContractReport(subject.name, tuple(kept), skipped)


def put_behind_guard(
    thing: str | Callable[..., Any],
    keywords: Mapping[str, Any],
    *,
    called: str,
    guard_type: type[AnyGuarded],
    build: Callable[..., AnyGuarded],
    guard: Callable[[Callable[..., Any]], AnyGuarded],
) -> AnyGuarded:
    """Build a plugin from all that `check_estimator` and `check_policy_loss` take."""
    if isinstance(thing, str | type):
        return build(thing, **keywords)
    if not isinstance(thing, guard_type) and _builds(thing, keywords):
        built = thing(**keywords)
        return built if isinstance(built, guard_type) else guard(built)
    if keywords:
        raise TypeError(
            f"{', '.join(keywords)}: the {called} is built already; pass its class or name with"
            " keywords"
        )
    return thing if isinstance(thing, guard_type) else guard(thing)


def _builds(thing: Callable[..., Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether a function called with the keywords makes an algorithm; else it is one."""
    try:
        inspect.signature(thing).bind(**keywords)
    except TypeError:
        return False
    return True


OPTIONAL = Rule(
    "optional-fields",
    "a field in optional may be absent",
    "test it with `is not None` before you read it",
)
STORAGE = Rule(
    "storage",
    "numbers count, not how they lie in memory",
    "use reshape instead of view, and no data_ptr or as_strided",
)


def check_declared(subject: Subject[Record], trial: Trial[Record]) -> None:
    """Leave out each field that is not declared."""
    full = subject.full(NEIGHBOURS, subject.seed)
    try:
        expected = subject.call_with_all(full)
        again = subject.call_with_all(full)
    except Exception:  # noqa: BLE001  (it fails with everything there: the rule `outputs` will say how)
        return
    if not same_outputs(expected, again):  # the rule `deterministic` will say so
        return
    everything = {*subject.guarded.always, *subject.optional}
    for field in sorted(set(subject.optional) - subject.guarded.takes):
        change = f"without {field!r}, which is not declared"
        less = only(full, everything - {field})
        trial.same(full, change, expected, trial.run(less, change, subject.call_with_all))


def check_deterministic(subject: Subject[Record], trial: Trial[Record]) -> None:
    """Repeat a call, at once and after another one."""
    batch = subject.batch(NEIGHBOURS)
    expected = trial.run(batch, call=subject.call_with_metrics)
    exactly = dict.fromkeys(expected, 0.0)

    def repeat(change: str) -> None:
        got = trial.run(batch, change, subject.call_with_metrics)
        trial.same(batch, change, expected, got, allowed=exactly)

    repeat("the same call again")
    trial.run(only(subject.full(NEIGHBOURS, subject.seed + 1), subject.guarded.takes))
    repeat("the same call after one on another batch")


def check_optional(subject: Subject[Record], trial: Trial[Record]) -> None:
    """Leave out each optional field, then all of them."""
    batch = subject.batch(NEIGHBOURS)
    takes = subject.guarded.takes
    optional = subject.guarded.optional
    for field in sorted(optional):
        trial.run(only(batch, takes - {field}), f"without {field!r}")
    trial.run(only(batch, takes - optional), "without any optional field")


def check_empty(subject: Subject[Record], trial: Trial[Record]) -> None:
    """Put an empty sequence at the begin, into the middle and at the end."""
    for layout in subject.layouts:
        count = len(layout.lengths)
        stranger = max(layout.groups) + 1
        for position, group in (
            (0, layout.groups[0]),
            (count // 2, layout.groups[-1]),
            (count, stranger),
        ):
            lengths = _inserted(layout.lengths, position, 0)
            batch = subject.batch(Layout(lengths, _inserted(layout.groups, position, group)))
            without, _ = take(batch, [b for b in range(count + 1) if b != position])
            change = f"with the empty sequence {position}"
            trial.same(batch, change, trial.run(without), trial.run(batch, change))


def _inserted(numbers: tuple[int, ...], position: int, number: int) -> tuple[int, ...]:
    return (*numbers[:position], number, *numbers[position:])


def check_float32(subject: Subject[Record], trial: Trial[Record]) -> None:
    """Compare float32 with float64 on ordinary numbers."""
    for layout in (*subject.layouts, Layout((4000, 1, 3000), (0, 0, 0))):
        trial.as_good_as_rounding(subject.batch(layout))


def check_extremes(subject: Subject[Record], trial: Trial[Record]) -> None:
    """Compare float32 with float64 on huge numbers."""
    for layout in subject.layouts:
        for change, batch in subject.extreme(subject.batch(layout)).items():
            trial.as_good_as_rounding(batch, change)


def check_storage(subject: Subject[Record], trial: Trial[Record]) -> None:
    """Pass tensors that are not contiguous."""
    for layout in peers(subject.seed):
        batch = subject.batch(layout)
        change = "tensors that are not contiguous"
        got = trial.run(strided(batch), change, subject.call_bare)
        trial.same(batch, change, trial.run(batch), got)
