"""The cases of the parity table: a pairwise covering array of everything that keeps gradients.

Pure and deterministic. `covering_array()` holds, of the legal cases of at most four ranks, enough
that each two values of two axes that can meet do meet in one case, and that each layout of `NAMED`
meets each value of every other axis.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from itertools import combinations, product
from typing import Any

MAX_RANKS = 4
NOT_BUILT: frozenset[str] = frozenset()  # what no case may use yet

AXES: dict[str, tuple[Any, ...]] = {
    "family": ("dense", "moe"),
    "kv_heads": (2, 1),  # with 1, TP 2 divides it
    "tp": (1, 2),
    "sp": (False, True),
    "pp": (1, 2),
    "vpp": (1, 2),
    "cp": (1, 2, 4),
    "dp": (1, 2),
    "ep": (1, 2),
    "etp": (1, 2),
    "distributed": (False, True),  # optimizer state sharded over data-parallel ranks
    "tied": (False, True),
    "minibatches": (1, 4),
    "budget": (20, 64),  # tokens of a micro-batch
    "algorithm": ("grpo", "ppo"),
}
LAYOUT = ("tp", "sp", "pp", "vpp", "cp", "dp", "ep", "etp")


@dataclass(frozen=True)
class Case:
    """One value of every axis."""

    family: str = "dense"
    kv_heads: int = 2
    tp: int = 1
    sp: bool = False
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    distributed: bool = False
    tied: bool = False
    minibatches: int = 1
    budget: int = 64
    algorithm: str = "grpo"

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def layout(self) -> tuple[Any, ...]:
        return tuple(getattr(self, axis) for axis in LAYOUT)

    @property
    def features(self) -> frozenset[str]:
        """The parts that a case builds."""
        return frozenset({"moe"} if self.family == "moe" else ()) | frozenset(
            {"cp"} if self.cp > 1 else ()
        )

    @property
    def layout_name(self) -> str:
        sizes = ("tp", "pp", "vpp", "cp", "dp", "ep")
        parts = [f"{axis}{getattr(self, axis)}" for axis in sizes if getattr(self, axis) > 1]
        parts += ["sp"] if self.sp else []
        parts += ["etp1"] if self.family == "moe" and self.etp < self.tp else []
        return "_".join(parts) or "one"

    @property
    def name(self) -> str:
        family = self.family + "_mqa" * (self.kv_heads == 1)
        return "-".join([
            self.layout_name, family, "tied" if self.tied else "untied", self.algorithm,
            f"mb{self.minibatches}", f"t{self.budget}", *(["dist"] if self.distributed else []),
        ])  # fmt: skip

    @property
    def legal(self) -> bool:
        """Whether Megatron computes this layout, and does so right."""
        if self.ranks > MAX_RANKS or (self.sp and self.tp == 1) or (self.vpp > 1 and self.pp == 1):
            return False
        if self.distributed and self.dp * self.cp == 1:
            return False  # nothing to shard over
        if self.family == "dense":
            return self.ep == 1 and self.etp == self.tp
        if self.tp > 1 and not self.sp:
            return False  # Megatron refuses to train experts under TP without SP
        if self.etp > self.tp or (self.tp > 1 and self.etp == 1 and self.ep == 1):
            return False  # the second: gradients of experts are never summed
        return self.tp * self.cp * self.dp % (self.etp * self.ep) == 0


# Layouts that meet every value of the other axes.
NAMED: tuple[Case, ...] = (
    Case(tp=2, etp=2),
    Case(tp=2, sp=True, etp=2),
    Case(pp=2),
    Case(pp=2, vpp=2),
    Case(cp=2),
    Case(cp=4),
    Case(dp=2),
    Case(tp=2, etp=2, pp=2),
    Case(tp=2, etp=2, sp=True, pp=2),
    Case(tp=2, etp=2, cp=2),
    Case(tp=2, etp=2, sp=True, cp=2),
    Case(pp=2, cp=2),
    Case(pp=2, dp=2),
    Case(dp=2, ep=2),
    Case(cp=2, ep=2),
    Case(dp=2, ep=2, pp=2),
    Case(tp=2, sp=True, ep=2),
)

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(case: Case) -> frozenset[Pair]:
    """Every two values that meet in a case."""
    values = [(field.name, getattr(case, field.name)) for field in fields(Case)]
    met: set[Pair] = set(combinations(values, 2))
    if case.layout in {named.layout for named in NAMED}:
        met |= {(("layout", case.layout), value) for value in values if value[0] not in LAYOUT}
    return frozenset(met)


@cache
def legal_cases() -> tuple[Case, ...]:
    """All legal cases of what is built, those of few ranks first."""

    def every() -> Iterator[Case]:
        for values in product(*AXES.values()):
            case = Case(**dict(zip(AXES, values)))
            if case.legal and not case.features & NOT_BUILT:
                yield case

    return tuple(sorted(every(), key=lambda case: case.ranks))


@cache
def covering_array() -> tuple[Case, ...]:
    """Choose the case that shows most new pairs; of equals the first in `legal_cases`."""
    shown = [pairs(case) for case in legal_cases()]
    numbers = {
        pair: i
        for i, pair in enumerate(
            dict.fromkeys(pair for some in shown for pair in sorted(some, key=repr))
        )
    }
    masks = [sum(1 << numbers[pair] for pair in some) for some in shown]
    left = (1 << len(numbers)) - 1
    chosen = []
    while left:
        best = max(range(len(masks)), key=lambda i: (masks[i] & left).bit_count())
        chosen.append(legal_cases()[best])
        left &= ~masks[best]
    return tuple(chosen)


@cache
def one_per_axis() -> tuple[Case, ...]:
    """A few cases of the array in which every value of every axis occurs."""
    left = {(axis, value) for case in covering_array() for axis, value in vars(case).items()}
    chosen = []
    while left:
        best = max(covering_array(), key=lambda case: len(left & set(vars(case).items())))
        chosen.append(best)
        left -= set(vars(best).items())
    return tuple(chosen)
