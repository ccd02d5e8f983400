"""One plugin under one rule: call it, compare two results, and say where they part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NoReturn

import torch
from torch import Tensor

from rlcore.algorithms.errors import EstimatorMutationError, UndeclaredInputError
from rlcore.algorithms.guard import Guarded
from rlcore.algorithms.testing.batches import (
    Layout,
    Record,
    cast,
    describe,
    loners,
    only,
    peers,
    tensors,
)
from rlcore.algorithms.testing.contract import ContractError, Rule

Outputs = Mapping[str, Tensor]  # by name, [M] each

READ_ONLY = Rule(
    "read-only",
    "inputs are read, never written",
    "compute out of place (x * y, not x.mul_(y)), or write into x.clone(); x.data and x.numpy()"
    " share memory with x",
)
# batches are float64, so that is no change
DTYPES = (("", torch.float64), ("inputs in float32", torch.float32))
# of the largest number, where two results should agree: above any order of summation
TOLERANCE = 1e-5
# how many times the effect of rounding its inputs to float32 an algorithm in float32 may be off
ROUNDINGS = 8


@dataclass(frozen=True)
class Subject(Generic[Record]):
    """A plugin behind its guard, the batches on which it is tried, and ways to call it."""

    guarded: Guarded
    seed: int
    optional: ClassVar[tuple[str, ...]]  # the fields that such a plugin may declare

    @property
    def name(self) -> str:
        """The name of the plugin in messages."""
        return f"{self.guarded.kind} {self.guarded.name!r}"

    @property
    def layouts(self) -> list[Layout]:
        """Layouts with groups of every size, and no empty sequence."""
        return [*loners(self.seed), *peers(self.seed)]

    def full(self, layout: Layout, seed: int) -> Record:
        """Return a batch with every field."""
        raise NotImplementedError

    def extreme(self, batch: Record) -> dict[str, Record]:
        """Return batches with huge numbers, by what was changed."""
        raise NotImplementedError

    def call(self, inputs: Record) -> Outputs:
        """Call the plugin behind its guard."""
        raise NotImplementedError

    def call_with_all(self, inputs: Record) -> Outputs:
        """Call it as if it had declared every field."""
        return self.call(inputs)

    def call_bare(self, inputs: Record) -> Outputs:
        """Call it without the copies that its guard makes."""
        return self.call(inputs)

    def call_with_metrics(self, inputs: Record) -> Outputs:
        """Call it; its metrics, if it has any, are among the results."""
        return self.call(inputs)

    def batch(self, layout: Layout) -> Record:
        """Return a batch with the fields that it takes."""
        return only(self.full(layout, self.seed), self.guarded.takes)


@dataclass(frozen=True)
class Trial(Generic[Record]):
    """A plugin under one rule, which a failure breaks."""

    subject: Subject[Record]
    rule: Rule

    def run(
        self, batch: Record, change: str = "", call: Callable[[Record], Outputs] | None = None
    ) -> Outputs:
        """Call the plugin; whatever it raises breaks the rule."""
        try:
            return (call or self.subject.call)(batch)
        except EstimatorMutationError as error:
            replace(self, rule=READ_ONLY).fail(batch, change, str(error), error)
        except UndeclaredInputError as error:
            self.fail(batch, change, str(error), error.__cause__)
        except Exception as error:  # noqa: BLE001  (anything at all that a plugin raises breaks the rule)
            self.fail(batch, change, f"{type(error).__name__}: {error}", error)

    def same(
        self,
        batch: Record,
        change: str,
        expected: Outputs,
        got: Outputs,
        *,
        places: Tensor | None = None,
        allowed: Mapping[str, float] | None = None,
    ) -> None:
        """Fail unless both results agree; entry i belongs to token `places[i]`, by default to i."""
        for name, wanted in expected.items():
            found = got.get(name)
            if found is None:
                self.fail(
                    batch, change, f"{name}: expected a tensor as without the change, got None"
                )
            limit = allowed[name] if allowed else TOLERANCE * max(1.0, largest(wanted))
            # NaN is apart
            apart = (~((found.double() - wanted.double()).abs() <= limit)).nonzero().flatten()
            if not apart.numel():
                continue
            first = int(apart[0])
            token = first if places is None else int(places[first])
            sequence = int(torch.searchsorted(batch.cu_seqlens, token, right=True)) - 1
            place = f"sequence {sequence}, token {token - int(batch.cu_seqlens[sequence])}"
            count = f"{apart.numel()} of {wanted.numel()} tokens differ, by more than {limit:.2g}"
            self.fail(
                batch,
                change,
                f"{name} of {place}: expected {wanted[first]:.8g}, got {found[first]:.8g}"
                f" ({count})",
            )

    def as_good_as_rounding(self, batch: Record, change: str = "") -> None:
        """Fail unless float32 gives what float64 gives, up to the rounding of the inputs."""
        change = f"{change}, " if change else ""
        narrow = cast(batch, torch.float32)
        wide = cast(narrow, torch.float64)
        expected = self.run(wide, f"{change}inputs in float64")
        got = self.run(narrow, f"{change}inputs in float32")
        moved = [self.run(other, f"{change}inputs in float64") for other in self._roundings(wide)]
        allowed = {
            name: (
                ROUNDINGS * max(largest(other[name] - value) for other in moved)
                + TOLERANCE * largest(value)
                + 1e-30
            )
            for name, value in expected.items()
        }
        self.same(
            narrow, f"{change}inputs in float32 instead of float64", expected, got, allowed=allowed
        )

    def _roundings(self, batch: Record) -> list[Record]:
        """Batches that float32 cannot tell from this one: moved by up to half a unit."""
        generator = torch.Generator().manual_seed(self.subject.seed)

        def moved(value: Tensor) -> Tensor:
            signs = torch.randint(0, 2, value.shape, generator=generator) * 2 - 1
            return value * (1 + signs * 2.0**-24)

        batches = []
        for _ in range(2):
            changed: dict[str, Any] = {
                name: moved(x) for name, x in tensors(batch) if x.is_floating_point()
            }
            batches.append(replace(batch, **changed))
        return batches

    def fail(
        self, batch: Record, change: str, finding: str, cause: BaseException | None = None
    ) -> NoReturn:
        """Raise the `ContractError` of this rule."""
        parts = [
            describe(batch, self.subject.guarded.takes),
            f"change: {change}" if change else "",
            finding,
        ]
        raise ContractError(
            self.subject.name, self.rule, "\n".join(part for part in parts if part)
        ) from cause


def largest(vector: Tensor) -> float:
    """Return the largest absolute value, 0 of nothing."""
    return float(vector.abs().max()) if vector.numel() else 0.0


def at(outputs: Outputs, index: Tensor) -> Outputs:
    """Choose and order tokens of every vector."""
    return {name: value[index] for name, value in outputs.items()}


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Return whether both tensors hold the same, NaN being NaN."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def same_outputs(a: Outputs, b: Outputs) -> bool:
    """Return whether two results are equal to the last bit."""
    return a.keys() == b.keys() and all(same_numbers(a[name], b[name]) for name in a)
