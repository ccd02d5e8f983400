"""The parts of a layer that part from transformers, by their names in the folder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backends.megatron.convert.layout import LAYER
from backends.megatron.convert.table import Entry, Split
from backends.megatron.model_check.hugging_face import HuggingFaceModel
from backends.megatron.model_check.record import Record, distance
from backends.megatron.model_check.stages import Stage

# What enters attention: its label, and the first letters of the submodules that make it.
_CORE: dict[str, tuple[str, tuple[str, ...]]] = {
    "query": ("query after norm and rotation", ("q",)),
    "key": ("key after norm and rotation", ("k",)),
    "value": ("value", ("v", "kv")),
    "scale": ("scale of the scores", ()),
}


@dataclass(frozen=True)
class Part:
    """One part of a layer.

    Attributes:
        name: transformers' name of a submodule, or what is compared.
        distance: the largest relative difference of a token's vector.
        tensors: the tensors of the folder that the part is made with.
        depth: 0 is a submodule of the layer, 1 a part of one.
    """

    name: str
    distance: float
    tensors: tuple[str, ...] = ()
    depth: int = 1


@dataclass
class _Child:
    """A submodule of our layer and transformers' own, with the rows of the table in it."""

    theirs: str
    rows: list[_Row] = field(default_factory=list)

    @property
    def tensors(self) -> tuple[str, ...]:
        return tuple(name for row in self.rows for name in row.entry.names)


@dataclass(frozen=True)
class _Row:
    """A row of the table in one layer: our module, and transformers' module of each part."""

    entry: Entry
    ours: str
    theirs: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors of the folder."""
        return self.entry.names


class LayerParts:
    """What corresponds to what in one layer, by the table.

    Rows of tensors that transformers' model has not are left out.
    """

    def __init__(self, stage: Stage, model: HuggingFaceModel) -> None:
        self._stage = stage
        self._children: dict[str, _Child] = {}
        for owned in stage.owned:
            match = LAYER.match(owned.entry.megatron)
            theirs = tuple(model.module_in_layer(part.name) for part in owned.entry.parts)
            if match is None or not all(theirs):
                continue
            ours = match[2].rpartition(".")[0]
            child = self._children.setdefault(
                ours.partition(".")[0], _Child(theirs[0].partition(".")[0])
            )
            child.rows.append(_Row(owned.entry, ours, theirs))

    @property
    def children(self) -> dict[str, str]:
        """The submodules of our layer, and transformers' names of them."""
        return {ours: child.theirs for ours, child in self._children.items()}

    def largest(self, ours: Record, theirs: Record) -> float:
        """The largest distance of the submodules' outputs."""
        found = [
            distance(ours.parts[own][1], theirs.parts[child.theirs][1])
            for own, child in self._children.items()
            if child.theirs in theirs.parts
        ]
        return max(found, default=0.0)

    def compare(self, ours: Record, theirs: Record, tolerance: float) -> Iterator[Part]:
        """Yield each submodule, and after one that parts its own parts, in order of computation.

        Args:
            ours: of a run whose submodules got transformers' inputs.
        """
        for own, child in self._children.items():
            if child.theirs not in theirs.parts:
                yield Part(child.theirs, float("inf"), child.tensors, depth=0)
                continue
            apart = distance(ours.parts[own][1], theirs.parts[child.theirs][1])
            yield Part(child.theirs, apart, child.tensors, depth=0)
            if apart > tolerance:
                yield from self._inside(own, child, ours, theirs)

    def _inside(self, own: str, child: _Child, ours: Record, theirs: Record) -> Iterator[Part]:
        last = [row for row in child.rows if row.entry.split is Split.ROW]
        first = [row for row in child.rows if row.entry.split is not Split.ROW]
        made_by = tuple(name for row in first for name in row.entry.names)
        for row in first:
            yield from self._outputs(row, ours, theirs)
        yield from _core(child, ours, theirs)
        if ours.routing is not None and theirs.routing is not None:
            yield from _routing(child, ours.routing, theirs.routing)
        for row in last:
            if row.entry.expert is None and row.theirs[0] in theirs.parts:
                inputs = (side.parts[name][0] for side, name in (
                    (ours, row.ours), (theirs, row.theirs[0])))  # fmt: skip
                yield Part(f"{row.theirs[0]} input", distance(*inputs), made_by)
                yield from self._outputs(row, ours, theirs)
        experts = sorted({name for row in child.rows if row.entry.expert is not None
                          for name in row.theirs})  # fmt: skip
        if experts and experts[0] in theirs.parts:
            yield Part(experts[0], *_experts(own, child, ours, theirs, experts[0]))

    def _outputs(self, row: _Row, ours: Record, theirs: Record) -> Iterator[Part]:
        """Compare the output of a row's module with the outputs of transformers' modules."""
        output = ours.parts.get(row.ours, (None, None))[1]
        if row.entry.expert is not None or output is None or "." not in row.ours:
            return
        # A bias belongs to the module of a matrix; a router's results are compared by themselves.
        if row.entry.megatron.endswith(".bias") or _is_router(row):
            return
        # Nor is a weight of a whole submodule, such as sinks, that of a module inside.
        if any(name not in theirs.parts or "." not in name for name in row.theirs):
            return
        width = sum(
            found.reshape(len(found), -1).size(1)
            for found in (theirs.parts[name][1] for name in row.theirs)
            if found is not None
        )
        if output.reshape(len(output), -1).size(1) != width:
            return
        if len(row.theirs) == 1:
            yield Part(row.theirs[0], distance(output, theirs.parts[row.theirs[0]][1]), row.names)
            return
        columns = output.reshape(len(output), -1).t().contiguous()
        pieces = self._stage.pieces(row.entry, columns)
        for module in dict.fromkeys(row.theirs):
            own = [n for n, name in enumerate(row.theirs) if name == module]
            joined = torch.cat([pieces[n] for n in own]).t()
            names = tuple(dict.fromkeys(row.entry.parts[n].name for n in own))
            yield Part(module, distance(joined, theirs.parts[module][1]), names)


def _core(child: _Child, ours: Record, theirs: Record) -> Iterator[Part]:
    """Compare what enters attention, after norms and rotary positions."""
    if not any(row.ours.startswith("self_attention.") for row in child.rows):
        return
    for name, (label, letters) in _CORE.items():
        if name in ours.core and name in theirs.core:
            made = [n for n in child.tensors if letters and n.split(".")[-2].startswith(letters)]
            apart = distance(ours.core[name], theirs.core[name])
            yield Part(f"{child.theirs}: {label}", apart, tuple(made))


def _routing(child: _Child, ours: Tensor, theirs: Tensor) -> Iterator[Part]:
    tensors = tuple(name for row in child.rows if _is_router(row) for name in row.names)
    if not tensors:
        return
    moved = ((ours != 0) != (theirs != 0)).any(1)
    share = float(moved.float().mean())
    yield Part(f"{child.theirs}: choice of experts (share of tokens)", share, tensors)
    yield Part(f"{child.theirs}: weights of experts", distance(ours, theirs), tensors)


def _is_router(row: _Row) -> bool:
    return row.ours.endswith(".router")


def _experts(
    own: str, child: _Child, ours: Record, theirs: Record, experts: str
) -> tuple[float, tuple[str, ...]]:
    """Compare the sum of the routed experts."""
    whole = ours.parts[own][1]
    shared = ours.parts.get(f"{own}.shared_experts", (None, None))[1]
    if whole is not None and shared is not None:
        whole = whole - shared.view_as(whole)
    tensors = tuple(
        name for row in child.rows if row.entry.expert is not None for name in row.names
    )
    return distance(whole, theirs.parts[experts][1]), tensors
