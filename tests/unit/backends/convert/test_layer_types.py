"""Windows and positions by type of layer, of Gemma 3 and Olmo 3, read as transformers does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3Config, Gemma3TextConfig, Gemma4TextConfig, Olmo3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

from backends.megatron.batch.rotary import inverse_frequencies
from backends.megatron.convert.read import read_architecture
from rlcore.errors import ModelError
from rlcore.hf_config.read import text_model_size
from rollout.engines.checks import folder_vocab_size

CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 31,
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 7, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "sliding_window": 8,
    "query_pre_attn_scalar": 24,
}  # fmt: skip
# As Gemma's folders have it, and as transformers 5 writes it.
OLD = {
    "rope_theta": 5000.0, "rope_local_base_freq": 50.0, "sliding_window_pattern": 3,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
NEW = {
    "layer_types": ["full_attention", "sliding_attention"] * 3 + ["sliding_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 700.0},
    },
}


def read(folder: Path, **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return read_architecture(folder, weights=False)


@pytest.mark.parametrize("changes", [{}, OLD, NEW], ids=["neither", "old", "new"])
def test_layers_have_the_positions_and_windows_of_their_type(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    arch = read(tmp_path, **changes)
    config = Gemma3TextConfig(**copy.deepcopy({**CONFIG, **changes}))
    module: Any = Gemma3RotaryEmbedding(config)
    assert len(arch.ropes) == len(arch.windows) == 7
    for kind, rope, window in zip(config.layer_types, arch.ropes, arch.windows, strict=True):
        assert window == (8 if kind == "sliding_attention" else None)
        theirs = getattr(module, f"{kind}_inv_freq")
        assert inverse_frequencies(rope).tolist() == theirs.tolist()
    assert arch.transformer["softmax_scale"] == 24**-0.5
    assert arch.tie_word_embeddings


GEMMA4 = {
    **CONFIG, "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 8,
    "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
}  # fmt: skip
WIDE = {"head_dim": 16, "num_key_value_heads": 1}


def read_gemma4(folder: Path, **changes: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({**GEMMA4, **changes}))
    return read_architecture(folder, weights=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"global_head_dim": 16, "num_global_key_value_heads": 1},
        {"global_head_dim": 16, "num_key_value_heads": 1},
        {"per_layer_config": {}},
        {"per_layer_config": {str(layer): {"head_dim": 16} for layer in (1, 3, 5, 6)}},
        {"per_layer_config": {str(layer): WIDE for layer in (1, 3, 5, 6)},
         "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 700.0, "factor": 2.0,
                "partial_rotary_factor": 0.5}}},
    ],
    ids=["published", "one number", "saved alike", "saved head size", "saved"],
)  # fmt: skip
def test_layers_without_a_window_have_heads_of_their_own(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    arch = read_gemma4(tmp_path, **changes)
    config = Gemma4TextConfig(**copy.deepcopy({**GEMMA4, **changes}))
    module: Any = Gemma4TextRotaryEmbedding(config)
    for layer, kind in enumerate(config.layer_types):
        own = config.per_layer_config[layer]
        sizes = (own.num_key_value_heads, own.head_dim)
        if kind == "full_attention":
            assert arch.full_heads == sizes
        else:
            fields = arch.transformer
            assert (fields["num_query_groups"], fields["kv_channels"]) == sizes
        theirs = getattr(module, f"{kind}_inv_freq")
        assert inverse_frequencies(arch.ropes[layer]).tolist() == theirs.tolist()
    assert arch.transformer["softmax_scale"] == 1.0
    assert arch.logit_cap == 30.0


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size_per_layer_input": 256}, {"num_kv_shared_layers": 2},
        {"use_double_wide_mlp": True}, {"enable_moe_block": True}, {"attention_k_eq_v": False},
        {"use_bidirectional_attention": "all"}, {"layer_types": ["sliding_attention"] * 7},
        {"per_layer_config": {"1": WIDE}}, {"num_global_key_value_heads": 3},
        {"global_head_dim": 15},
        {"per_layer_config": {"1": {**WIDE, "head_dim": 8}, "3": WIDE, "5": WIDE, "6": WIDE}},
        {"per_layer_config": {str(layer): {**WIDE, "x": 1} for layer in (1, 3, 5, 6)}},
    ],
)  # fmt: skip
def test_other_parts_of_gemma_4_are_refused_by_name(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        read_gemma4(tmp_path, **changes)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 500000, "rope_scaling": YARN},
        {"rope_parameters": {
            "full_attention": {**YARN, "rope_theta": 700.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0}},
         "layer_types": NEW["layer_types"]},
    ],
    ids=["neither", "old", "new"],
)  # fmt: skip
def test_yarn_is_of_the_layers_without_a_window(changes: dict[str, Any], tmp_path: Path) -> None:
    given = {**CONFIG, "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(given))
    arch = read_architecture(tmp_path, weights=False)
    config = Olmo3Config(**copy.deepcopy(given))
    module: Any = Olmo3RotaryEmbedding(config)
    assert len(arch.ropes) == len(arch.windows) == 7
    for kind, rope, window in zip(config.layer_types, arch.ropes, arch.windows, strict=True):
        assert window == (8 if kind == "sliding_attention" else None)
        assert inverse_frequencies(rope).tolist() == getattr(module, f"{kind}_inv_freq").tolist()
        assert rope.attention_factor == getattr(module, f"{kind}_attention_scaling")


def test_a_setting_that_transformers_does_not_read_is_refused(tmp_path: Path) -> None:
    given = {**CONFIG, "model_type": "olmo3", "architectures": ["Olmo3ForCausalLM"],
             "rope_scaling": {**YARN, "truncate": False}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(given))
    with pytest.raises(ModelError, match=r"full_attention\.truncate: got False"):
        read_architecture(tmp_path, weights=False)


def test_a_folder_with_a_vision_tower_leaves_sizes_out(tmp_path: Path) -> None:
    """As Gemma 3 4B's; trainer and engines take those of transformers."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    given = {"model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(given))
    arch = read_architecture(tmp_path, weights=False)
    theirs = Gemma3Config(**copy.deepcopy(given)).text_config
    assert arch.vocab_size == folder_vocab_size(str(tmp_path)) == theirs.vocab_size
    longest = theirs.max_position_embeddings
    assert (
        arch.max_position_embeddings
        == text_model_size(tmp_path, "max_position_embeddings")
        == longest
    )
    assert arch.transformer["num_attention_heads"] == theirs.num_attention_heads
    assert arch.transformer["num_query_groups"] == theirs.num_key_value_heads
    assert arch.transformer["kv_channels"] == theirs.head_dim
    assert arch.tie_word_embeddings
    assert [*arch.windows] == [
        1024 if kind == "sliding_attention" else None for kind in theirs.layer_types
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"attn_logit_softcapping": 50.0}, {"final_logit_softcapping": 30.0},
        {"use_bidirectional_attention": True}, {"hidden_activation": "silu"},
        {"layer_types": ["sliding_attention"] * 6}, {"layer_types": ["linear_attention"] * 7},
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        read(tmp_path, **changes)
