"""A run of a DeepSeek-V3: engine, reference and export all have the bias of its routers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from workspace import Workspace

from rlcore.launch.commands.init_model import ModelSpec, init_model

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def write(folder: Path, dtype: torch.dtype) -> None:
    """A bias of the size of the scores: without it most tokens would go to other experts."""
    init_model(
        folder,
        ModelSpec(family="deepseek_v3", hidden=32, layers=2, heads=4, intermediate=32, experts=4),
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    router = model.model.layers[1].mlp.gate
    # the last two are none in bf16
    router.e_score_correction_bias = torch.tensor([0.1, -0.3, 0.501, 0.2003])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """In bf16 the biases are in a shard of their own, since no bucket mixes dtypes."""
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) <= 2
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


@pytest.mark.parametrize(
    ("dtype", "distance"), [("fp32", 1e-5), pytest.param("bf16", 0.05, marks=pytest.mark.full)]
)
def test_engine_and_trainer_agree_step_after_step(
    dtype: str, distance: float, workspace: Workspace
) -> None:
    folder = workspace.folder / f"latent_{dtype}"
    write(folder, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    run = workspace.train(
        f"latent {dtype}", f"model.path={folder}", f"model.dtype={dtype}",
        "policy.optimizer.lr=1e-2", "algorithm.kl.loss_coef=0.01",
    )  # fmt: skip
    assert run.code == 0, run.err
    assert len(run.metrics) == 3
    assert all(0 <= row["rollout/train_rollout_logprob_diff"] < distance for row in run.metrics)
    # the reference is the policy yet
    assert run.metrics[0]["rollout/kl"] == pytest.approx(0.0, abs=distance)
    assert run.metrics[2]["rollout/kl"] != 0.0
    before = weights(folder)
    after = weights(run.folder / "hf")
    assert after.keys() == before.keys()
    assert after[BIAS].dtype == torch.float32
    assert torch.equal(after[BIAS], before[BIAS])
    attention = "model.layers.1.self_attn.kv_b_proj.weight"
    assert not torch.equal(after[attention], before[attention])
