"""The architecture of a Hugging Face folder, and folders that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.megatron.convert.read import read_architecture
from rlcore.errors import ModelError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 31,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def folder(tmp_path: Path, weights: str = "model.safetensors", **changes: Any) -> Path:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / weights).touch()
    return tmp_path


def test_llama(tmp_path: Path) -> None:
    arch = read_architecture(folder(tmp_path))
    assert (arch.family, arch.vocab_size, arch.head, arch.activation) == ("llama", 31, "lm", "silu")
    assert not arch.tie_word_embeddings
    assert (arch.rope_theta, arch.rope_scaling) == (500000.0, None)
    assert arch.transformer == {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "qk_layernorm": False,
        "add_qkv_bias": False,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"num_key_value_heads": None}, "num_query_groups", 4),
        ({"head_dim": 16}, "kv_channels", 16),
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "add_qkv_bias", True),
        ({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}, "qk_layernorm", True),
        # Qwen3's own default
        ({"model_type": "qwen3", "architectures": None}, "kv_channels", 128),
        # with experts it has none
        ({"model_type": "qwen3_moe", "architectures": None, **MOE}, "kv_channels", 8),
    ],
)
def test_what_the_config_leaves_unsaid(
    tmp_path: Path, changes: dict[str, Any], key: str, value: object
) -> None:
    assert read_architecture(folder(tmp_path, **changes)).transformer[key] == value


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 10000.0, "rope_scaling": LLAMA3_ROPE},
        {"rope_theta": None, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 10000.0}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_both_spellings_of_rope(tmp_path: Path, changes: dict[str, Any]) -> None:
    arch = read_architecture(folder(tmp_path, **changes))
    assert arch.rope_theta == 10000.0
    assert arch.rope_scaling == {"rope_scaling": True, "rope_scaling_factor": 32.0}


def test_linear_rope_and_the_oldest_spelling(tmp_path: Path) -> None:
    arch = read_architecture(folder(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}))
    assert arch.rope_scaling == {"seq_len_interpolation_factor": 2.0}


def test_a_reward_model_has_a_value_head(tmp_path: Path) -> None:
    changes = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    assert read_architecture(folder(tmp_path, **changes)).head == "value"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not converted",
        ),
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "converted are: LlamaForCausalLM, ",
        ),
        (
            {"architectures": ["LlamaForTokenClassification"]},
            "LlamaForTokenClassification is not converted",
        ),
        (
            {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "a", "1": "b"}},
            "2 labels",
        ),
        ({"model_type": None, "architectures": None}, "model_type None"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"model_type": "qwen2_moe", "architectures": None, "qkv_bias": False}, "qkv_bias: False"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "RoPE type 'yarn'"),
        ({"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": 2.0}}, "low_freq_factor 2.0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor None"),
        ({"vocab_size": None}, "vocab_size: got None"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers: got 'two'"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        read_architecture(folder(tmp_path, **changes))
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_refused_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        read_architecture(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        read_architecture(tmp_path)
    with pytest.raises(ModelError, match=r"no weights.*pytorch_model"):
        read_architecture(folder(tmp_path, weights="pytorch_model.bin"))
    (tmp_path / "model.safetensors.index.json").touch()
    assert read_architecture(tmp_path).vocab_size == 31


def test_reading_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, backends.megatron.convert.architecture; "
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
