"""Weights that replicas hold alike: each is written once, and every replica writes its share."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from backends.megatron.checkpoint.shards import assign_to_replicas
    from backends.megatron.parallel.state import ParallelState
    from backends.megatron.testing import stub_mpu

SIZES = (64, 7, 33, 40, 12, 1, 1, 50, 30)


def held_by(parallel: ParallelState) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """The weights of a rank: dense ones, every second made by a factory, and experts."""
    replica = parallel.dp_rank * parallel.cp_size + parallel.cp_rank
    found: dict[str, ShardedTensor | ShardedTensorFactory] = {}
    for k, size in enumerate(SIZES):
        for key, number in ((f"layer{k}", replica), (f"mlp.experts.{k}", parallel.edp_rank)):
            data = torch.zeros(size)
            if k % 2:
                found[key] = ShardedTensorFactory(key, data, lambda *_: {}, lambda loaded: loaded)
                found[key].replica_id = (0, 0, number)
            else:
                found[key] = ShardedTensor.from_rank_offsets(key, data, replica_id=(0, 0, number))
    return found


@pytest.mark.parametrize(("dp", "cp", "ep"), [(1, 1, 1), (4, 1, 1), (2, 2, 1), (4, 1, 2)])
def test_each_weight_is_written_once_and_the_shares_are_alike(dp: int, cp: int, ep: int) -> None:
    written: Counter[str] = Counter()
    shares: Counter[tuple[str, int]] = Counter()
    for rank in range(dp * cp):
        mpu = stub_mpu(data=dp, context=cp, expert=ep, rank=rank)
        parallel = ParallelState.from_mpu(mpu)
        weights = held_by(parallel)
        assign_to_replicas({"model": weights}, parallel)
        for key, entry in weights.items():
            if entry.replica_id == (0, 0, 0):
                kind = "experts" if "experts" in key else "dense"
                written[f"{key} of {parallel.ep_rank}" if kind == "experts" else key] += 1
                shares[kind, rank] += entry.data.numel()
    assert set(written.values()) == {1}
    assert len(written) == len(SIZES) * (1 + ep)
    for kind, replicas in (("dense", dp * cp), ("experts", dp * cp // ep)):
        for rank in range(dp * cp):
            assert shares[kind, rank] <= sum(SIZES) / replicas + 7


def test_what_megatron_lets_nobody_write_stays_so() -> None:
    """A tied embedding's copy on the last stage, a norm's copy on another tensor-parallel rank."""
    parallel = ParallelState.from_mpu(stub_mpu(data=2, rank=1))
    copy = ShardedTensor.from_rank_offsets("word", torch.zeros(4), replica_id=(1, 0, 1))
    assign_to_replicas({"model": {"word": copy}}, parallel)
    assert copy.replica_id[0] == 1
