"""The cases of tests/backend_mutants.py: a layout of ranks computes what plain torch computes.

Ranks and oracle are forked, since torch and Megatron are loaded already: a case takes a second or
two. pytest collects this file only by its name.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lora_oracle
import mtp_oracle
import oracle
import parity_ranks
import pytest
import rank_main
import torch

TIGHT = 1e-5
DEADLINE_S = 60
# coefficients of the routers' losses
AUX = 0.05
Z = 0.02

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = {"rank": lora_oracle.RANK, "alpha": lora_oracle.ALPHA, "targets": TARGETS,
    "expert_rank": lora_oracle.RANK, "path": "adapter"}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "tp2": {"model": "qwen3", "plan": "uneven", "parallel": {"tensor": 2}},
    "tp2_sp": {"model": "qwen3", "plan": "uneven", "parallel": {"tensor": 2, "sequence": True},
        "critic": True},
    # Two ranks hold a KV head.
    "tp4": {"model": "qwen3", "plan": "uneven", "parallel": {"tensor": 4}},
    "pp2_tied": {"model": "qwen3_tied", "plan": "uneven", "parallel": {"pipeline": 2}},
    "vpp2": {"model": "qwen3", "plan": "pairs", "parallel": {"pipeline": 2, "virtual_pipeline": 2}},
    "pp2_uneven": {"model": "qwen3_three", "plan": "uneven", "parallel": {"pipeline": 2,
        "first_stage_layers": 1}},
    "cp2": {"model": "qwen3", "plan": "uneven", "parallel": {"context": 2}, "critic": True},
    "cp2_moe": {"model": "qwen3_moe", "plan": "one", "parallel": {"context": 2},
                "megatron": {"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}},
    "dp2": {"model": "qwen3", "plan": "starved", "distributed": True, "critic": True},
    "mtp_tp2_sp": {"model": "predicting", "source": "qwen2_tied", "plan": "uneven",
        "mtp_coef": mtp_oracle.COEF, "parallel": {"tensor": 2, "sequence": True}},
    "lora_tp2": {"model": "qwen3", "plan": "uneven", "parallel": {"tensor": 2}, "lora": LORA},
    "lora_tp2_sp": {"model": "qwen3", "plan": "uneven", "lora": LORA,
        "parallel": {"tensor": 2, "sequence": True},
        "megatron": {"recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1}},
    "lora_etp2": {"model": "qwen3_moe", "plan": "uneven", "lora": LORA,
        "parallel": {"tensor": 2, "sequence": True}},
    "lora_ep2": {"model": "qwen3_moe", "plan": "dp2", "lora": LORA, "grouped": True,
        "parallel": {"expert": 2}},
}  # fmt: skip


def in_children(functions: list[Callable[[], None]]) -> None:
    """Run each in a forked process; all end by one deadline."""
    processes = [
        multiprocessing.get_context("fork").Process(target=function) for function in functions
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    for process in processes:
        process.kill()
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


def rank_of(rank: int, size: int, folder: Path) -> Callable[[], None]:
    def run() -> None:
        warnings.resetwarnings()  # pytest's, which make errors of Megatron's
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        sys.argv = ["parity_ranks.py", str(folder)]
        rank_main.main(parity_ranks.run)

    return run


@pytest.mark.parametrize("name", CASES)
def test_a_layout_equals_plain_torch(name: str, tmp_path: Path) -> None:
    case = {"name": name, **CASES[name]}
    world = tmp_path / "world"
    models = tmp_path / "models"
    expected_file = tmp_path / "expected.pt"
    world.mkdir()
    (world / "payload.json").write_text(json.dumps([case]))
    head = torch.randn(1, 32, generator=torch.Generator().manual_seed(3)) / 33**0.5

    def expect() -> None:
        oracle.write_models(models, only={case.get("source", case["model"])})
        if "source" in case:
            predicting = (models / case["model"], models / case["source"])
            mtp_oracle.write(*predicting)
            torch.save({"policy": mtp_oracle.step(*predicting)}, expected_file)
            return
        if "lora" in case:
            lora_oracle.write_adapter(
                models / case["model"], models / "adapter", TARGETS, lora_oracle.RANK
            )
            found = lora_oracle.by_definition(models / case["model"], models / "adapter")
            torch.save({"policy": found}, expected_file)
            return
        expected = {"policy": oracle.policy_step(models / case["model"])}
        if "megatron" in case:
            expected["policy"] |= oracle.router_step(models / case["model"], aux=AUX, z=Z)
        if case.get("critic"):
            expected["critic"] = oracle.critic_step(models / case["model"], head)
        torch.save(expected, expected_file)

    in_children([expect])
    size = max(2, case.get("parallel", {}).get("tensor", 1))
    in_children([rank_of(rank, size, world) for rank in range(size)])
    got, expected = (
        torch.load(path, weights_only=False) for path in (world / f"{name}.pt", expected_file)
    )
    torch.testing.assert_close(
        got["scores"]["logprobs"].double(), expected["policy"]["logprobs"], atol=TIGHT, rtol=0
    )
    for model, of in expected.items():
        for weight, gradient in of["gradients"].items():
            error = (got["gradients"][model][weight].double() - gradient).norm() / gradient.norm()
            assert error <= TIGHT, f"{model}: {weight}: gradient off by {float(error):.1e}"
    if "lora" in case or "source" in case:
        gradients = expected["policy"]["gradients"].items()
        counted = [g.norm() for name, g in gradients if ".mtp_layers." not in name]
        whole = torch.stack(counted).norm()
        assert got["metrics"]["train/grad_norm"] == pytest.approx(float(whole), rel=TIGHT)
