"""The matrices of a model that get adapters: `policy.lora`. Imports neither torch nor Megatron."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from backends.megatron.convert.architecture import Architecture, tensor_shapes
from backends.megatron.convert.table import Entry, Part, Split
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import ConfigError

ALL_LINEAR = "all-linear"
"""PEFT's word for every linear layer except the head."""

LAYER_NUMBER = re.compile(r"\.layers\.(\d+)\.")

_LINEAR = {Split.QKV, Split.STACKED, Split.COLUMN, Split.ROW}


@dataclass(frozen=True)
class Adapted:
    """One Megatron weight with adapters on some of its Hugging Face matrices."""

    entry: Entry
    pieces: tuple[int, ...]  # indices among the entry's matrices, `Entry.names`
    rank: int

    @property
    def modules(self) -> dict[int, str]:
        """Index of each matrix -> its layer's name in transformers: `...self_attn.q_proj`."""
        return {index: self.entry.names[index].removesuffix(".weight") for index in self.pieces}


def adapted_layers(arch: Architecture, config: LoraConfig) -> dict[str, Adapted]:
    """The weights with adapters, by Megatron's name, in the order of a forward pass.

    Raises ConfigError if a target names no matrix of the model, or no matrix has an adapter.
    """
    expert_rank = config.expert_rank
    if expert_rank is None:
        chosen = int(arch.transformer.get("moe_router_topk") or 1)
        expert_rank = max(config.rank // chosen, 1)
    found: dict[str, Adapted] = {}
    known: set[str] = set()
    _check_parts(arch, config)
    for entry in linear_entries(arch):
        known.update(map(target_name, entry.names))
        rank = config.rank if entry.expert is None else expert_rank
        pieces = tuple(
            index
            for index, name in enumerate(entry.names)
            if {ALL_LINEAR, target_name(name)} & set(config.targets)
        )
        if pieces and rank:
            found[entry.megatron] = Adapted(entry, pieces, rank)
    for target in config.targets:
        if target not in {ALL_LINEAR, *known}:
            raise ConfigError(
                f"policy.lora.targets: {target!r} names no linear layer of {arch.family}; it has"
                f" {', '.join(sorted(known))}, and {ALL_LINEAR} stands for all of them"
            )
    if not found:
        raise ConfigError(
            f"policy.lora: no layer gets an adapter: targets {', '.join(config.targets)}, rank of"
            f" experts {expert_rank}"
        )
    return found


def linear_entries(arch: Architecture) -> Iterator[Entry]:
    """The weights that can have adapters, in the order of a forward pass."""
    for entry in arch.entries():
        if _is_linear(entry) and _takes_adapters(entry):
            yield entry


def _is_linear(entry: Entry) -> bool:
    # PEFT takes a tensor of all experts for a parameter, not for linear layers.
    is_matrix = len(entry.parts[0].shape) == 2 and not entry.parts[0].of_experts
    return is_matrix and entry.split in _LINEAR and entry.megatron.endswith(".weight")


def _takes_adapters(entry: Entry) -> bool:
    """Whether B has an order that every layout shares, in which ranks hold consecutive rows.

    That is the order of the weight, if its groups are whole on each rank; heads of attention may be
    divided.
    """
    return len(entry.names) == len(entry.parts) or entry.group != "head"


def _check_parts(arch: Architecture, config: LoraConfig) -> None:
    """Refuse targets in a weight that has one matrix of several parts."""
    for entry in filter(_is_linear, arch.entries()):
        names = sorted(set(map(target_name, entry.names)))
        wrong = {ALL_LINEAR, *names} & set(config.targets)
        if wrong and not _takes_adapters(entry):
            raise ConfigError(
                f"policy.lora.targets: {min(wrong)!r} targets {', '.join(names)} of {arch.family},"
                " where a matrix has several parts and cannot have an adapter; name other layers,"
                f" such as {', '.join(sorted({*map(target_name, _attention(arch))}))}"
            )


def _attention(arch: Architecture) -> Iterator[str]:
    """The matrices of attention that can have adapters."""
    for entry in linear_entries(arch):
        yield from (name for name in entry.names if ".self_attention." in entry.megatron)


def target_name(tensor: str) -> str:
    """The word by which PEFT targets a matrix: "q_proj" of `...self_attn.q_proj.weight`."""
    return tensor.split(".")[-2]


def factor_entries(arch: Architecture, adapted: Adapted) -> list[tuple[Entry, tuple[int, ...]]]:
    """A row of the conversion table for each A and B of a weight, and the factor's whole shape.

    TP splits B of a column-parallel and A of a row-parallel layer, along the same dimension as the
    weight; the other is whole on all ranks. The rows of B are in the order of the weight's rows.
    """
    entry = adapted.entry
    by_row = entry.split is Split.ROW
    found = []
    for module in adapted.modules.values():
        own = [part for part in entry.parts if part.name == f"{module}.weight"]
        a = Part(f"{module}.lora_A.weight", (adapted.rank, own[0].shape[1]))
        b = [
            replace(part, name=f"{module}.lora_B.weight", shape=(part.shape[0], adapted.rank))
            for part in own
        ]
        by_column = Split.COLUMN if len(own) == 1 else entry.split
        splits = (Split.ROW, Split.REPLICATED) if by_row else (Split.REPLICATED, by_column)
        for parts, split in zip(((a,), tuple(b)), splits):
            name = parts[0].name
            row = replace(entry, megatron=name, parts=parts, split=split)
            found.append((row, tensor_shapes(arch, row)[name]))
    return found


def factor_rows(arch: Architecture, config: LoraConfig) -> list[tuple[Entry, tuple[int, ...]]]:
    """The rows of `factor_entries` for a whole model, in the order of a forward pass."""
    layers = adapted_layers(arch, config).values()
    return [row for adapted in layers for row in factor_entries(arch, adapted)]
