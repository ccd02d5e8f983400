"""A trainer offloaded in host memory between steps: nothing stays on the device, and training is
the same to the bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from spawn import run_ranks

from backends.megatron.training.offload import OffloadedState

RANKS = Path(__file__).with_name("offloaded_trainer_ranks.py")
CPU = torch.device("cpu")

ONE: list[dict[str, Any]] = [
    {"name": "bf16", "plan": "one", "dtype": "bf16", "model": "qwen3"},
    {
        "name": "offloaded_too",
        "plan": "uneven",
        "model": "qwen3",
        "offload": True,
        "offload_trained": True,
    },
]
TWO: list[dict[str, Any]] = [
    {
        "name": "tp2_sp",
        "plan": "uneven",
        "model": "qwen3",
        "parallel": {"tensor": 2, "sequence": True},
    },
    {"name": "pp2", "plan": "pairs", "model": "qwen2_tied", "parallel": {"pipeline": 2}},
]
DISTRIBUTED: list[dict[str, Any]] = [
    {
        "name": "dp2_distributed",
        "plan": "starved",
        "distributed": True,
        "model": "qwen3",
        "dtype": "bf16",
    },
    {
        "name": "ep2_distributed",
        "plan": "starved",
        "distributed": True,
        "model": "qwen3_moe",
        "parallel": {"expert": 2},
    },
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
def test_a_parked_trainer_goes_on_as_if_it_had_stayed(
    size: int, cases: list[dict[str, Any]], tmp_path: Path
) -> None:
    oracle.write_models(tmp_path / "models", only={case["model"] for case in cases})
    run_ranks(RANKS, size, tmp_path / "world", cases, deadline_s=200)


def test_what_stays_leaves_once_and_comes_back_for_its_users() -> None:
    tensor = torch.arange(4.0)
    offloading = OffloadedState(lambda: [tensor], CPU, stays=True)
    with offloading.present():
        pass
    assert offloading.num_bytes == 0
    offloading.leave()
    offloading.leave()
    assert (offloading.num_bytes, tensor.untyped_storage().nbytes()) == (16, 0)
    with offloading.present():
        tensor.add_(1)
        offloading.stay()
    offloading.stay()
    assert (offloading.num_bytes, tensor.tolist()) == (0, [1, 2, 3, 4])
    with offloading.present():
        offloading.leave()
        assert tensor.tolist() == [1, 2, 3, 4]  # its user has it still
    assert offloading.num_bytes == 16


def test_what_does_not_stay_is_never_asked_to() -> None:
    tensor = torch.ones(4)
    offloading = OffloadedState(lambda: [tensor], CPU)
    offloading.stay()
    assert offloading.num_bytes == 16
    offloading.leave()
    with offloading.present():
        assert tensor.tolist() == [1, 1, 1, 1]
    assert offloading.num_bytes == 16
