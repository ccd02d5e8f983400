"""One plugin under one rule: it is called, results are compared; and the rules for every plugin."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NoReturn, Self

import torch
from torch import Tensor

from rlcore.algorithms.errors import EstimatorMutationError, UndeclaredInputError
from rlcore.algorithms.plugin_guard import Guarded
from rlcore.algorithms.testing.batches import (
    NEIGHBOURS,
    WITHOUT_TOKENS,
    Layout,
    Record,
    converted,
    describe,
    floating,
    full_batch,
    loners,
    only,
    peers,
    take,
)
from rlcore.algorithms.testing.contract import ContractError, ContractReport, Rule

Outputs = Mapping[str, Tensor]  # by name, [M] each

READ_ONLY = Rule(
    "read-only",
    "inputs are read, never written",
    "compute out of place (x * y, not x.mul_(y)), or write into x.clone(); x.data and x.numpy()"
    " share memory with x",
)
DECLARED = Rule(
    "declared-fields",
    "a field that is not in needs or optional is absent, and has no part in the result",
    "declare it: needs for a field that must be there, optional for one that may be",
)
DETERMINISTIC = Rule(
    "deterministic",
    "the same batch gives the same result, whatever was called in between",
    "keep no state between calls and draw no random numbers: a loss chooses tokens by a hash of"
    " sequence_ids and position; of an estimator you may say random=True",
)
OPTIONAL = Rule(
    "optional-fields",
    "a field in optional may be absent",
    "test it with `is not None` before you read it",
)
EMPTY = Rule(
    "empty-sequences",
    "a sequence without tokens changes nothing, and its reward, which may be NaN, is not read",
    "leave out such sequences first: member = segment_lengths(inputs.cu_seqlens) > 0; segment_mean"
    " defines the mean of nothing as 0",
)
NO_TOKENS = Rule(
    "no-tokens",
    "a batch without tokens, or without sequences, gives empty results",
    "max and min of nothing raise",
)
FLOAT32 = Rule(
    "float32",
    "float32 gives what float64 gives, to the rounding of the inputs, on huge numbers too",
    "accumulate in float64 (x.double()) and convert the result; take variances in two passes, never"
    " E[x^2] - mean^2; clamp a log-ratio before exp, as the gradient of a clamped ratio is inf",
)
# Largest difference of equal results, relative to the largest number: above any summation order.
TOLERANCE = 1e-5
# Largest error of an algorithm in float32, as a multiple of the effect of rounding its inputs.
ROUNDINGS = 8


@dataclass(frozen=True)
class Case(Generic[Record]):
    """A plugin behind its guard under one rule, which a failure breaks."""

    guarded: Guarded
    seed: int
    rule: Rule = READ_ONLY
    # The records of its inputs, and the fields that a plugin of this kind may declare.
    record: ClassVar[type[Any]]
    optional: ClassVar[tuple[str, ...]]

    @abstractmethod
    def extreme(self, batch: Record) -> dict[str, Record]:
        """Return batches with huge numbers, by what was changed."""

    @abstractmethod
    def call(self, inputs: Record) -> Outputs:
        """Call the plugin behind its guard."""

    def call_with_all(self, inputs: Record) -> Outputs:
        """Call it as if it had declared every field."""
        return self.call(inputs)

    def call_with_metrics(self, inputs: Record) -> Outputs:
        """Call it; its metrics, if it has any, are among the results."""
        return self.call(inputs)

    @property
    def name(self) -> str:
        """The name of the plugin in messages."""
        return f"{self.guarded.kind} {self.guarded.name!r}"

    @property
    def layouts(self) -> list[Layout]:
        """Layouts with groups of every size, and no empty sequence."""
        return [*loners(self.seed), *peers(self.seed)]

    def batch(self, layout: Layout) -> Record:
        """Return a batch with the fields that the plugin takes."""
        batch: Record = full_batch(self.record, layout, self.seed)
        return only(batch, self.guarded.takes)

    def run(
        self, batch: Record, change: str = "", call: Callable[[Record], Outputs] | None = None
    ) -> Outputs:
        """Call the plugin; whatever it raises breaks the rule."""
        try:
            return (call or self.call)(batch)
        except EstimatorMutationError as error:
            replace(self, rule=READ_ONLY).fail(batch, change, str(error), error)
        except UndeclaredInputError as error:
            rule = OPTIONAL if self.rule is OPTIONAL else DECLARED
            replace(self, rule=rule).fail(batch, change, str(error), error.__cause__)
        except Exception as error:  # noqa: BLE001  (anything at all that a plugin raises breaks the rule)
            self.fail(batch, change, f"{type(error).__name__}: {error}", error)

    def run_both(self, batch: Record, change: str = "") -> None:
        """Call the plugin in float64 and in float32; its guard refuses what is not finite."""
        self.run(batch, change)
        self.run(converted(batch, torch.float32), f"{change}{change and ', '}inputs in float32")

    def same(
        self,
        batch: Record,
        change: str,
        expected: Outputs,
        got: Outputs,
        *,
        tokens: Tensor | None = None,
        allowed: Mapping[str, float] | None = None,
    ) -> None:
        """Fail unless both results agree; entry i belongs to token `tokens[i]`, by default to i."""
        for name, wanted in expected.items():
            if (found := got.get(name)) is None:
                message = f"{name}: expected a tensor as without the change, got None"
                self.fail(batch, change, message)
            limit = allowed[name] if allowed else TOLERANCE * max(1.0, largest(wanted))
            # a NaN on one side counts as a difference
            apart = (~((found.double() - wanted.double()).abs() <= limit)).nonzero().flatten()
            if not apart.numel():
                continue
            first = int(apart[0])
            token = first if tokens is None else int(tokens[first])
            sequence = int(torch.searchsorted(batch.cu_seqlens, token, right=True)) - 1
            self.fail(
                batch,
                change,
                f"{name} of sequence {sequence}, token {token - int(batch.cu_seqlens[sequence])}:"
                f" expected {wanted[first]:.8g}, got {found[first]:.8g} ({apart.numel()} of"
                f" {wanted.numel()} tokens differ, by more than {limit:.2g})",
            )

    def as_good_as_rounding(self, batch: Record, change: str = "") -> None:
        """Fail unless float32 gives what float64 gives, up to the rounding of the inputs."""
        change = f"{change}{change and ', '}inputs in float32 instead of float64"
        narrow = converted(batch, torch.float32)
        wide = converted(narrow, torch.float64)
        expected = self.run(wide, change)
        got = self.run(narrow, change)
        generator = torch.Generator().manual_seed(self.seed)

        def moved(value: Tensor) -> Tensor:
            """Move numbers by half a unit of float32, where they still round to the same value."""
            signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
            return value * (1 + signs * 2.0**-24)

        others = [self.run(floating(wide, moved), change) for _ in range(2)]
        allowed = {
            name: ROUNDINGS * max(largest(other[name] - value) for other in others)
            + TOLERANCE * largest(value)
            + 1e-30
            for name, value in expected.items()
        }
        self.same(narrow, change, expected, got, allowed=allowed)

    def fail(
        self, batch: Record, change: str, failure: str, cause: BaseException | None = None
    ) -> NoReturn:
        """Raise the `ContractError` of this rule."""
        shown = describe(batch, self.guarded.takes)
        lines = [shown, *([f"change: {change}"] if change else []), failure]
        raise ContractError(self.name, self.rule, "\n".join(lines)) from cause

    def keep(
        self, rules: Mapping[Rule, Callable[[Self], None]], skipped: Mapping[Rule, str]
    ) -> ContractReport:
        """Check the rules in order, except those in `skipped`, which holds the reasons."""
        kept = tuple(rule for rule in rules if rule not in skipped)
        for rule in kept:
            rules[rule](replace(self, rule=rule))
        return ContractReport(self.name, kept, skipped)


def largest(vector: Tensor) -> float:
    """Return the largest absolute value, 0 of nothing."""
    return float(vector.abs().max()) if vector.numel() else 0.0


def at(outputs: Outputs, index: Tensor) -> Outputs:
    """Choose and order tokens of every vector."""
    return {name: value[index] for name, value in outputs.items()}


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Return whether both tensors hold the same, NaN being NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


# --- rules for every plugin -----------------------------------------------------------------------


def check_read_only(case: Case[Any]) -> None:
    """Check for writes alone; every other rule's calls check for them too."""
    case.run(case.batch(NEIGHBOURS))


def check_declared(case: Case[Any]) -> None:
    """Leave out each field that is not declared."""
    full = full_batch(case.record, NEIGHBOURS, case.seed)
    expected = case.run(full, call=case.call_with_all)
    everything = {*case.guarded.always, *case.optional}
    for field in sorted(set(case.optional) - case.guarded.takes):
        change = f"without {field!r}, which is not declared"
        got = case.run(only(full, everything - {field}), change, case.call_with_all)
        case.same(full, change, expected, got)


def check_deterministic(case: Case[Any]) -> None:
    """Repeat a call, at once and after another one."""
    batch = case.batch(NEIGHBOURS)
    expected = case.run(batch, call=case.call_with_metrics)
    for change in ("the same call again", "the same call after one on another batch"):
        got = case.run(batch, change, case.call_with_metrics)
        case.same(batch, change, expected, got, allowed=dict.fromkeys(expected, 0.0))
        other = full_batch(case.record, NEIGHBOURS, case.seed + 1)
        case.run(only(other, case.guarded.takes))


def check_optional(case: Case[Any]) -> None:
    """Leave out each optional field, then all of them."""
    batch = case.batch(NEIGHBOURS)
    optional = sorted(case.guarded.optional)
    for absent in (*([field] for field in optional), optional):
        change = f"without {', '.join(absent) or 'any optional field'}"
        case.run(only(batch, case.guarded.takes - {*absent}), change)


def check_empty(case: Case[Any]) -> None:
    """Put an empty sequence at the begin, into the middle and at the end."""
    for layout in case.layouts:
        count = len(layout.lengths)
        for position, group in (
            (0, layout.groups[0]),
            (count // 2, layout.groups[-1]),
            (count, max(layout.groups) + 1),
        ):
            batch = case.batch(
                Layout(
                    (*layout.lengths[:position], 0, *layout.lengths[position:]),
                    (*layout.groups[:position], group, *layout.groups[position:]),
                )
            )
            without, _ = take(batch, [b for b in range(count + 1) if b != position])
            change = f"with the empty sequence {position}"
            case.same(batch, change, case.run(without), case.run(batch, change))


def check_no_tokens(case: Case[Any]) -> None:
    """Pass batches without tokens, and without sequences."""
    for layout in WITHOUT_TOKENS:
        case.run(case.batch(layout))


def check_float32(case: Case[Any]) -> None:
    """Compare float32 with float64, on ordinary numbers and on huge ones."""
    for layout in (*case.layouts, Layout((4000, 1, 3000), (0, 0, 0))):
        case.as_good_as_rounding(case.batch(layout))
    for layout in case.layouts:
        for change, batch in case.extreme(case.batch(layout)).items():
            case.as_good_as_rounding(batch, change)
