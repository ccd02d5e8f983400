"""Adapters in a checkpoint: under the names of their matrices, so that any layout reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import nn

from backends.megatron.convert.adapters import factor_rows
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.table import Split
from backends.megatron.model.lora import named_factors
from backends.megatron.parallel.state import ParallelState
from rlcore.config.sections.policy import LoraConfig

KEY = "adapters."
"""What a checkpoint puts before the name of a factor."""

# A weight file is sampled: so many blocks of so many bytes, evenly spread.
_BLOCKS = 16
_BLOCK_BYTES = 1 << 16


def sharded_factors(
    chunks: Sequence[nn.Module], arch: Architecture, lora: LoraConfig, parallel: ParallelState
) -> dict[str, ShardedTensor]:
    """This rank's parts of the factors, by name."""
    held = named_factors(chunks)
    state = {}
    for entry, _ in factor_rows(arch, lora):
        name = entry.megatron
        if name not in held:
            continue
        expert = entry.expert is not None
        rank, size = parallel.split_of(expert=expert)
        whole = entry.split is Split.REPLICATED
        axis = 1 if entry.split is Split.ROW else 0
        replica = parallel.dp_rank * parallel.cp_size + parallel.cp_rank
        state[name] = ShardedTensor.from_rank_offsets(
            KEY + name,
            held[name],
            *([] if whole else [(axis, rank, size)]),
            replica_id=(0, rank if whole else 0, parallel.edp_rank if expert else replica),
        )
    return state


def described(lora: LoraConfig, base: Path) -> dict[str, Any]:
    """What the manifest says of adapters: their settings, and the weights that they belong to."""
    settings = lora.model_dump(include={"rank", "alpha", "targets", "expert_rank"})
    return {**settings, "base": str(base), "base_digest": weights_digest(base)}


def weights_digest(folder: Path) -> str:
    """A digest of the names and sizes of a folder's weight files, and of samples of their bytes.

    Two models of one architecture differ everywhere, so samples tell them apart without a second
    reading of many gigabytes.
    """
    digest = hashlib.sha256()
    for path in sorted((*folder.rglob("*.safetensors"), *folder.rglob("*.distcp"))):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder)} {size}\n".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
