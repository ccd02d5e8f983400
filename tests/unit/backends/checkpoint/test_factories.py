"""Parameters that a checkpoint holds in parts are read where they are, and merged only if not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    from backends.megatron.checkpoint.shards import plan_sharded, read_sharded

pytestmark = pytest.mark.usefixtures("one_rank")
SAVED = torch.arange(24.0).view(6, 4)


def in_halves(parameter: Tensor, merged: list[Tensor], *, copied: bool) -> dict[str, Any]:
    """The state of a parameter that is saved as two halves, as a gate and an up projection are."""

    def build(key: str, whole: Tensor, *_: Any) -> list[ShardedTensor]:
        halves = [half.clone() if copied else half for half in whole.chunk(2)]
        return [
            ShardedTensor.from_rank_offsets(key, half, (0, place, 2))
            for place, half in enumerate(halves)
        ]

    def merge(halves: list[Tensor]) -> Tensor:
        merged.append(torch.cat(halves))
        return merged[-1]

    return {"up": ShardedTensorFactory("up", parameter, build, merge)}


@pytest.mark.parametrize("copied", [False, True])
def test_halves_are_merged_only_where_they_were_read_elsewhere(
    tmp_path: Path, copied: bool
) -> None:
    merged: list[Tensor] = []
    planned = plan_sharded(in_halves(SAVED.clone(), merged, copied=False), tmp_path)
    planned.write()
    planned.finish()
    parameter = torch.zeros_like(SAVED)
    loaded = read_sharded(in_halves(parameter, merged, copied=copied), tmp_path)
    assert torch.equal(loaded["up"], SAVED)
    assert len(merged) == int(copied)
    assert (loaded["up"].data_ptr() == parameter.data_ptr()) == (not copied)
