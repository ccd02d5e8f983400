"""Experts: the fields of `config.json`, the parameters of experts, and layouts that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from backends.megatron.checks.layout import check_layout
from backends.megatron.convert.architecture import Architecture, model_entries, part_shapes
from backends.megatron.convert.read import read_architecture
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import ConfigError, ModelError

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64, "vocab_size": 31, "num_experts_per_tok": 2,
}  # fmt: skip
QWEN3_MOE = {
    **SIZES,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
QWEN2_MOE = {**SIZES, "model_type": "qwen2_moe", "num_experts": 6, "moe_intermediate_size": 24,
             "shared_expert_intermediate_size": 40}  # fmt: skip


def read(folder: Path, config: dict[str, Any], **changes: Any) -> Architecture:
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in {**config, **changes}.items() if v != "absent"})
    )
    (folder / "model.safetensors").touch()
    return read_architecture(folder)


def test_qwen3_moe(tmp_path: Path) -> None:
    fields = read(tmp_path, QWEN3_MOE).transformer
    assert {key: fields[key] for key in fields if "moe" in key} == {
        "num_moe_experts": 6, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_layer_freq": 1,
        "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("config", "changes", "key", "value"),
    [
        (QWEN3_MOE, {"num_experts": "absent", "num_local_experts": 8}, "num_moe_experts", 8),
        (QWEN2_MOE, {}, "moe_shared_expert_gate", True),
    ],
)
def test_other_spellings(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], key: str, value: object
) -> None:
    assert read(tmp_path, config, **changes).transformer[key] == value


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (QWEN3_MOE, {"num_experts": "absent"}, "num_experts or num_local_experts: got None"),
        (QWEN3_MOE, {"num_experts_per_tok": 7}, "got 7, expected at most the 6 experts"),
        (QWEN3_MOE, {"mlp_only_layers": [0, 1, 2, 3]}, "leave no layer with experts"),
    ],
)
def test_refused(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError) as caught:
        read(tmp_path, config, **changes)
    assert words in str(caught.value)


def test_every_expert_of_every_layer_that_has_them(tmp_path: Path) -> None:
    arch = read(tmp_path, QWEN2_MOE, mlp_only_layers=[1])
    entries = {entry.megatron: entry for entry in model_entries(arch, "lm")}
    assert sum(entry.expert is not None for entry in entries.values()) == 3 * 6 * 2
    layer = "decoder.layers.1.mlp."
    assert {name for name in entries if name.startswith(layer)} == {
        layer + "linear_fc1.weight",
        layer + "linear_fc2.weight",
    }
    last = entries["decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight"]
    assert last.names == tuple(
        f"model.layers.3.mlp.experts.5.{part}_proj.weight" for part in ("gate", "up")
    )
    shapes = {
        name.split("mlp.")[1]: part_shapes(arch, entries[name])
        for name in entries
        if ".layers.0.mlp." in name
    }
    assert shapes["router.weight"] == [(6, 32)]
    assert shapes["experts.local_experts.0.linear_fc2.weight"] == [(32, 24)]
    assert shapes["shared_experts.linear_fc1.weight"] == [(40, 32)] * 2
    assert shapes["shared_experts.gate_weight"] == [(1, 32)]


def test_experts_that_do_not_divide_the_world(tmp_path: Path) -> None:
    """The other layouts that are refused are in test_layouts.py."""
    with pytest.raises(ConfigError, match="= 3 does not divide the world size 4"):
        check_layout(read(tmp_path, QWEN3_MOE), ParallelConfig(expert=3), 4)


def test_layouts_that_fit(tmp_path: Path) -> None:
    arch = read(tmp_path, QWEN3_MOE)
    for layout, world in (
        ({"expert": 2}, 2),
        ({"tensor": 2, "sequence": True}, 2),
        ({"tensor": 2, "sequence": True, "expert_tensor": 1, "expert": 2}, 2),
        ({"pipeline": 2, "expert": 2}, 4),
    ):
        check_layout(arch, ParallelConfig(**layout), world)


def test_biases_of_experts_are_added_once(tmp_path: Path) -> None:
    sizes = {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "num_experts": "absent",
    }
    arch = read(tmp_path, QWEN3_MOE, model_type="gpt_oss", architectures="absent", **sizes)
    layout = {"tensor": 2, "sequence": True, "expert": 2}
    check_layout(arch, ParallelConfig(**layout, expert_tensor=1), 2)
    with pytest.raises(ConfigError, match=r"expert_tensor: 2, but .* biases.*; set it to 1"):
        check_layout(arch, ParallelConfig(**layout), 4)
