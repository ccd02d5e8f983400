"""Training and checkpoints are the same to the bit with critic and optimizer in host memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from spawn import run_ranks

from backends.megatron.training.offload import OffloadedTensors, Retention

RANKS = Path(__file__).with_name("offload_ranks.py")
CPU = torch.device("cpu")

SHARDED = {"plan": "starved", "distributed": True}
# Adapters of experts alone: Megatron's optimizer of the other parameters is empty.
EXPERTS = {
    "plan": "starved",
    "model": "qwen3_moe",
    "parallel": {"expert": 2},
    "lora": {"rank": 4, "alpha": 8, "targets": ["up_proj", "down_proj"], "expert_rank": 2},
}
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"name": "fp32", "plan": "uneven"},
        {"name": "bf16", "plan": "one", "dtype": "bf16"},
        {"name": "bf16_gradients", "plan": "uneven", "dtype": "bf16", "narrow": True},
        {"name": "fused", "plan": "uneven", "fused": True},
        {"name": "fused_distributed", "plan": "one", "fused": True, "distributed": True},
    ],
    2: [
        {"name": "dp2_distributed", **SHARDED},
        {"name": "dp2_bf16_gradients", **SHARDED, "dtype": "bf16", "narrow": True},
        {"name": "ep2_distributed", **SHARDED, "model": "qwen3_moe", "parallel": {"expert": 2}},
        {"name": "ep2_bf16_gradients", **SHARDED, "model": "qwen3_moe", "parallel": {"expert": 2},
         "dtype": "bf16", "narrow": True},
        {"name": "experts_alone", **EXPERTS},
        {"name": "experts_alone_distributed", **EXPERTS, "distributed": True},
    ],
}  # fmt: skip


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.full)])
def test_training_and_checkpoints_are_the_same_with_and_without(size: int, tmp_path: Path) -> None:
    oracle.write_models(tmp_path / "models")
    run_ranks(RANKS, size, tmp_path / "world", CASES[size], deadline_s=150)


def test_views_stay_views_of_the_loaded_storage() -> None:
    buffer = torch.arange(6.0)
    view = buffer[2:4]
    shared = buffer.view(2, 3)
    offloaded = OffloadedTensors(lambda: [view, shared], CPU)
    assert (buffer.untyped_storage().nbytes(), offloaded.num_bytes) == (0, 24)
    with offloaded.on_device():
        assert torch.equal(view, torch.tensor([2.0, 3.0]))
        view.add_(10)
        with offloaded.on_device():
            assert shared[0, 2] == 12
        assert offloaded.num_bytes == 0
    with offloaded.on_device():
        assert buffer.tolist() == [0, 1, 12, 13, 4, 5]


def test_tensors_that_appear_later_are_offloaded_too() -> None:
    tensors = [torch.ones(4)]
    offloaded = OffloadedTensors(lambda: tensors, CPU)
    with offloaded.on_device():
        tensors.append(torch.full((2,), 7.0))
        tensors.append(torch.tensor(1.0))  # a scalar stays
    assert (offloaded.num_bytes, float(tensors[2])) == (24, 1)
    with offloaded.on_device():
        del tensors[0]
    with offloaded.on_device():
        assert tensors[0].tolist() == [7, 7]
    assert offloaded.num_bytes == 8


def test_frozen_contents_are_copied_out_once_and_scratch_never() -> None:
    frozen = torch.ones(4)
    scratch = torch.ones(4)
    keeping = OffloadedTensors(lambda: [frozen], CPU, Retention.FROZEN)
    dropping = OffloadedTensors(lambda: [scratch], CPU, Retention.SCRATCH)
    with keeping.on_device(), dropping.on_device():
        assert scratch.untyped_storage().nbytes() == 16
        frozen.zero_()
    with keeping.on_device():
        assert frozen.tolist() == [1, 1, 1, 1]
    assert (keeping.num_bytes, dropping.num_bytes) == (16, 16)
