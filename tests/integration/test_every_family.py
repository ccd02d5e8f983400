"""A run of each family that `rlcore init-model` makes: engine, trainer and export agree on it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from workspace import Workspace

from backends.megatron.convert.architecture import weight_tensors
from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.read import read_architecture
from rlcore.launch.commands.init_model import ModelSpec, init_model

# Layers of every kind, and a head of its own.
SIZES = {"hidden": 32, "layers": 4, "intermediate": 64, "experts": 4, "tied": False}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_steps(workspace: Workspace, family: str) -> None:
    folder = workspace.folder / f"family_{family.replace('/', '_')}"
    init_model(folder, ModelSpec(family=family, **SIZES))
    run = workspace.train(
        f"family {family.replace('/', ' ')}", f"model.path={folder}", "training.steps=2",
        "policy.optimizer.lr=1e-2",
    )  # fmt: skip
    assert run.code == 0, run.err
    first, second = run.metrics
    # The second step's weights were published by the first.
    assert first["train/grad_norm"] > 0
    assert second["rollout/train_rollout_logprob_diff"] < 1e-5
    before = load_file(folder / "model.safetensors")
    after = {
        k: t
        for file in (run.folder / "hf").glob("*.safetensors")
        for k, t in load_file(file).items()
    }
    assert after.keys() == before.keys()
    trained = {name for name, *_ in weight_tensors(read_architecture(folder), "float32", "lm")}
    kept = {name for name in before if torch.equal(before[name], after[name])}
    assert before.keys() - trained <= kept
    frozen = ("e_score_correction_bias", "layer_scalar")
    assert {name for name in kept & trained if not name.endswith(frozen)} == set()
