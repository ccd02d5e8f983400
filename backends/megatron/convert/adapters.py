"""The matrices of a model that get adapters: `policy.lora`. Imports neither torch nor Megatron."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from backends.megatron.convert.architecture import Architecture, part_shapes
from backends.megatron.convert.table import Entry, Split
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
    pieces: tuple[int, ...]  # indices among the entry's matrices
    rank: int

    @property
    def modules(self) -> dict[int, str]:
        """Index of each matrix -> its layer's name in transformers: `...self_attn.q_proj`."""
        return {
            index: self.entry.parts[index].name.removesuffix(".weight") for index in self.pieces
        }


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
            for index, part in enumerate(entry.parts)
            if {ALL_LINEAR, target_name(part.name)} & set(config.targets)
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
        if _is_linear(entry) and len(entry.names) == len(entry.parts):
            yield entry


def _is_linear(entry: Entry) -> bool:
    # PEFT takes a tensor of all experts for a parameter, not for linear layers.
    is_matrix = len(entry.parts[0].shape) == 2 and not entry.parts[0].of_experts
    return is_matrix and entry.split in _LINEAR and entry.megatron.endswith(".weight")


def _check_parts(arch: Architecture, config: LoraConfig) -> None:
    """Refuse targets in a weight that has one matrix of several parts."""
    for entry in filter(_is_linear, arch.entries()):
        names = sorted(set(map(target_name, entry.names)))
        wrong = {ALL_LINEAR, *names} & set(config.targets)
        if len(entry.names) < len(entry.parts) and wrong:
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


def factor_entries(arch: Architecture, adapted: Adapted) -> list[tuple[Entry, tuple[int, int]]]:
    """A row of the conversion table for each A and B of a weight, and the factor's whole shape.

    TP splits B of a column-parallel and A of a row-parallel layer, along the same dimension as the
    weight; the other is whole on all ranks.
    """
    by_row = adapted.entry.split is Split.ROW
    splits = (Split.ROW, Split.REPLICATED) if by_row else (Split.REPLICATED, Split.COLUMN)
    shapes = part_shapes(arch, adapted.entry)
    found = []
    for index, module in adapted.modules.items():
        out, width = shapes[index]
        factors = {"lora_A": (adapted.rank, width), "lora_B": (out, adapted.rank)}
        for (factor, shape), split in zip(factors.items(), splits):
            name = f"{module}.{factor}.weight"
            part = replace(adapted.entry.parts[index], name=name)
            row = replace(adapted.entry, megatron=name, parts=(part,), split=split)
            found.append((row, shape))
    return found


def factor_rows(arch: Architecture, config: LoraConfig) -> list[tuple[Entry, tuple[int, int]]]:
    """The rows of `factor_entries` for a whole model, in the order of a forward pass."""
    layers = adapted_layers(arch, config).values()
    return [row for adapted in layers for row in factor_entries(arch, adapted)]
