"""A trainer that is offloaded between steps leaves the device, and trains the same to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from spawn import run_ranks

from backends.megatron.training.offload import OffloadedTensors, wait_for_memory
from rlcore.errors import DeadlineExceeded

RANKS = Path(__file__).with_name("offloaded_trainer_ranks.py")
CPU = torch.device("cpu")

SHARDED = {"plan": "starved", "distributed": True}
ONE: list[dict[str, Any]] = [
    {"name": "bf16", "plan": "one", "dtype": "bf16", "model": "qwen3"},
    {"name": "offloaded_too", "plan": "uneven", "model": "qwen3", "offload": True,
     "offload_trained": True},
    {"name": "experts", "plan": "uneven", "model": "qwen3_moe"},
    {"name": "adapters", "plan": "uneven", "model": "qwen3",
     "lora": {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]}},
]  # fmt: skip
TWO: list[dict[str, Any]] = [
    {"name": "tp2_sp", "plan": "uneven", "model": "qwen3",
     "parallel": {"tensor": 2, "sequence": True}},
    {"name": "pp2", "plan": "pairs", "model": "qwen2_tied", "parallel": {"pipeline": 2}},
]  # fmt: skip
DISTRIBUTED: list[dict[str, Any]] = [
    {"name": "dp2_distributed", **SHARDED, "model": "qwen3", "dtype": "bf16"},
    {"name": "ep2_distributed", **SHARDED, "model": "qwen3_moe", "parallel": {"expert": 2}},
]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (1, ONE),
        pytest.param(2, TWO, marks=pytest.mark.full),
        pytest.param(2, DISTRIBUTED, marks=pytest.mark.full),
    ],
    ids=["one_process", "model_parallel", "distributed_optimizer"],
)
def test_an_offloaded_trainer_goes_on_as_if_it_had_stayed(
    size: int, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    oracle.write_models(tmp_path / "models", only={case["model"] for case in cases})
    run_ranks(RANKS, size, tmp_path / "world", cases, deadline_s=200)


def test_tensors_on_the_device_are_offloaded_once_and_loaded_for_their_users() -> None:
    tensor = torch.arange(4.0)
    offloaded = OffloadedTensors(lambda: [tensor], CPU, keep_on_device=True)
    with offloaded.on_device():
        pass
    assert offloaded.num_bytes == 0
    offloaded.offload()
    offloaded.offload()
    assert (offloaded.num_bytes, tensor.untyped_storage().nbytes()) == (16, 0)
    with offloaded.on_device():
        tensor.add_(1)
        offloaded.onload()
    offloaded.onload()
    assert (offloaded.num_bytes, tensor.tolist()) == (0, [1, 2, 3, 4])
    with offloaded.on_device():
        offloaded.offload()
        assert tensor.tolist() == [1, 2, 3, 4]  # its user still has it
    assert offloaded.num_bytes == 16


def test_onload_has_no_effect_on_tensors_that_are_always_offloaded() -> None:
    tensor = torch.ones(4)
    offloaded = OffloadedTensors(lambda: [tensor], CPU)
    offloaded.onload()
    assert offloaded.num_bytes == 16
    offloaded.offload()
    with offloaded.on_device():
        assert tensor.tolist() == [1, 1, 1, 1]
    assert offloaded.num_bytes == 16


def test_the_trainer_returns_when_the_engines_memory_is_free() -> None:
    """Their other ranks may release theirs after the answer of the first."""
    tensor = torch.ones(4)
    offloaded = OffloadedTensors(lambda: [tensor], CPU, keep_on_device=True)
    always = OffloadedTensors(lambda: [torch.ones(2)], CPU)
    offloaded.offload()
    assert (offloaded.returning_bytes, always.returning_bytes) == (16, 0)
    free = iter((0, 8, 15, 16))
    wait_for_memory(CPU, 16, free=lambda: next(free))
    assert next(free, None) is None
    with pytest.raises(DeadlineExceeded, match=r"needs 3\.0 GiB .* 0\.1 s .* 2\.5 GiB are free"):
        wait_for_memory(CPU, 3 << 30, free=lambda: 5 << 29, timeout_s=0.1)
