"""What a server is started with for adapters, and how they are packed for it."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from pathlib import Path

import pytest
import torch

from rlcore.adapter_folder import AdapterFolder
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import ConfigError
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.weights import Bucket, TensorSpec, are_factors, raw_bytes
from rollout.engines.sglang.adapters import server_arguments
from rollout.engines.sglang.factory import ATTENTION, check_adapters, check_adapters_on_cpu
from rollout.weight_sync.adapter import AdapterSender, PackedAdapter

SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 48}


def test_factors_of_several_ranks_become_one_with_the_same_products() -> None:
    alpha = 6.0
    factors = {
        "a.q_proj.lora_A.weight": torch.randn(4, 6),
        "a.q_proj.lora_B.weight": torch.randn(5, 4),
        "a.experts.0.up_proj.lora_A.weight": torch.randn(3, 6),
        "a.experts.0.up_proj.lora_B.weight": torch.randn(7, 3),
    }
    specs = [TensorSpec(name, tuple(t.shape), "float32") for name, t in factors.items()]
    assert are_factors(specs)
    assert not are_factors([*specs, TensorSpec("a.q_proj.weight", (5, 6), "float32")])
    flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in factors.values()])
    packed = PackedAdapter(**json.loads(AdapterSender().pack(Bucket(0, tuple(specs)), flat)))
    assert packed.rank == 4
    tensors = pickle.loads(base64.b64decode(packed.payload))
    assert packed.checksums == {
        name: hashlib.sha256(raw_bytes(tensor)).hexdigest() for name, tensor in tensors.items()
    }
    for module, rank in (("a.q_proj", 4), ("a.experts.0.up_proj", 3)):
        a, b = (tensors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        assert a.shape[0] == b.shape[1] == 4
        own = factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
        torch.testing.assert_close(alpha / 4 * (b @ a), alpha / rank * own)


def test_a_server_is_started_for_the_rank_and_the_targets() -> None:
    lora = LoraConfig(rank=8, targets=["q_proj", "v_proj"], expert_rank=16)
    arguments = server_arguments(lora, "cuda", "unread")
    assert arguments["max_lora_rank"] == 16
    assert arguments["lora_target_modules"] == ["q_proj", "v_proj"]
    assert "lora_backend" not in arguments
    assert server_arguments(lora, "cpu", "unread")["lora_backend"] == "torch_native"
    earlier = AdapterFolder(Path(), "", 32, 1.0, ("o_proj", "v_proj"))
    both = server_arguments(lora, "cuda", "unread", [earlier])
    assert both["max_lora_rank"] == 32
    assert both["lora_target_modules"] == ["o_proj", "q_proj", "v_proj"]
    assert both["max_loras_per_batch"] == arguments["max_loras_per_batch"] + 1


LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}


@pytest.mark.parametrize(
    ("family", "attention"),
    [("qwen3", ATTENTION), ("qwen3_moe", ATTENTION), ("deepseek_v3", LATENT)],
)
def test_all_linear_layers_are_named_without_head_embedding_and_routers(
    tmp_path: Path, family: str, attention: set[str]
) -> None:
    """SGLang's "all" would wrap the head, whose logits are then in bf16, whatever is asked for."""
    experts = {} if family == "qwen3" else {"experts": 4, "experts_per_token": 2, "tied": False}
    init_model(tmp_path / "model", ModelSpec(family=family, **SIZES, **experts))
    named = server_arguments(LoraConfig(), "cuda", str(tmp_path / "model"))["lora_target_modules"]
    assert named == sorted({*attention, "gate_proj", "up_proj", "down_proj"})


@pytest.mark.parametrize(
    ("family", "targets", "wrong"),
    [
        ("qwen3_5_text", ["q_proj", "in_proj_qkv", "out_proj"], "in_proj_qkv"),
        ("qwen3_5_moe_text", ["all-linear"], "all-linear"),
        ("qwen3_next", ["q_proj", "o_proj"], "q_proj, o_proj"),
    ],
)
def test_what_sglang_does_not_compute_of_gated_delta_rules_is_refused(
    tmp_path: Path, family: str, targets: list[str], wrong: str
) -> None:
    place = tmp_path / "config.json"
    for model in ({"model_type": family}, {"text_config": {"model_type": family}}):
        place.write_text(json.dumps(model))
        with pytest.raises(
            ConfigError, match=rf"targets: got {wrong}, of which SGLang .* {family}"
        ):
            check_adapters(str(tmp_path), targets)
    place.write_text(json.dumps({"model_type": "qwen3_5_text"}))
    check_adapters(str(tmp_path), ["q_proj", "out_proj"])
    place.write_text(json.dumps({"model_type": "qwen3"}))
    check_adapters(str(tmp_path), ["all-linear"])


def test_on_a_cpu_layers_with_experts_take_none(tmp_path: Path) -> None:
    init_model(tmp_path / "dense", ModelSpec(**SIZES))
    experts = {"experts": 4, "experts_per_token": 2, "tied": False}
    init_model(tmp_path / "moe", ModelSpec(family="qwen3_moe", **SIZES, **experts))
    check_adapters_on_cpu(str(tmp_path / "dense"), ["all-linear"])
    check_adapters_on_cpu(str(tmp_path / "moe"), ["q_proj", "o_proj"])
    with pytest.raises(ConfigError, match=r"policy\.lora\.targets: got all-linear, but on a CPU"):
        check_adapters_on_cpu(str(tmp_path / "moe"), ["all-linear"])
