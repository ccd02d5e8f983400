"""The architecture of a Hugging Face folder, and folders that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from backends.megatron.convert.read import read_architecture, with_prediction
from backends.megatron.convert.rope import Rope
from rlcore.errors import ModelError
from rollout.engines.checks import folder_vocab_size, model_config

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


def folder(tmp_path: Path, weights: str = "model.safetensors", **changes: Any) -> Path:
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / weights).touch()
    return tmp_path


def test_llama(tmp_path: Path) -> None:
    arch = read_architecture(folder(tmp_path))
    assert (arch.family, arch.vocab_size, arch.head) == ("llama", 31, "lm")
    assert not arch.tie_word_embeddings
    assert arch.ropes == (Rope("default", 500000.0, 8),) * 2
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
    "changes",
    [
        {"rope_theta": 10000.0, "rope_scaling": LLAMA3_ROPE},
        {"rope_theta": None, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 10000.0}},
    ],
    ids=["transformers 4", "transformers 5"],
)
def test_both_spellings_of_rope(tmp_path: Path, changes: dict[str, Any]) -> None:
    arch = read_architecture(folder(tmp_path, **changes))
    llama3 = Rope("llama3", 10000.0, 8, factor=32.0, original_length=8192)
    assert arch.ropes == (llama3,) * 2


def test_linear_rope_and_the_oldest_spelling(tmp_path: Path) -> None:
    arch = read_architecture(folder(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}))
    assert arch.ropes == (Rope("linear", 500000.0, 8, factor=2.0),) * 2


def test_a_reward_model_has_a_value_head(tmp_path: Path) -> None:
    changes = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    assert read_architecture(folder(tmp_path, **changes)).head == "value"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            "GPT2LMHeadModel is not converted; converted are: LlamaForCausalLM, ",
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
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            "rope_scaling.rope_type: got 'dynamic', expected default, ",
        ),
        (
            {"rope_scaling": {**LLAMA3_ROPE, "low_freq_factor": -2.0}},
            "rope_scaling.low_freq_factor: got -2.0",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor: got nothing"),
        ({"vocab_size": None}, "vocab_size: got nothing"),
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


@pytest.mark.parametrize("count", [0, 2, None])
def test_a_model_without_one_layer_for_further_tokens_trains_none(
    tmp_path: Path, count: int | None
) -> None:
    changes = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True}
    arch = read_architecture(folder(tmp_path, **changes, num_nextn_predict_layers=1))
    assert with_prediction(arch).mtp
    hf_config = {**arch.hf_config, "num_nextn_predict_layers": count}
    with pytest.raises(ModelError, match=rf"policy.mtp_coef .* got mimo with .* {count}: set it"):
        with_prediction(replace(arch, hf_config=hf_config))


def test_reading_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, backends.megatron.convert.architecture; "
        "assert not {'torch', 'megatron', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def tied(tmp_path: Path, **tensors: torch.Tensor) -> Path:
    folder(tmp_path, tie_word_embeddings=True)
    names = {"head": "lm_head.weight", "embedding": "model.embed_tokens.weight"}
    save_file(
        {names[key]: tensor.clone() for key, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    return tmp_path


def test_a_tied_model_has_no_other_head(tmp_path: Path) -> None:
    embedding = torch.randn(31, 32)
    for head in (embedding + 1e-3, embedding[:30], embedding.double(), embedding * torch.nan):
        with pytest.raises(ModelError, match=r"config\.json: tie_word_embeddings: got True") as e:
            read_architecture(tied(tmp_path, embedding=embedding, head=head))
        assert "lm_head.weight in the folder is not model.embed_tokens.weight" in str(e.value)
        assert read_architecture(tmp_path, weights=False).tie_word_embeddings
        untied = folder(tmp_path, tie_word_embeddings=False)
        assert not read_architecture(untied).tie_word_embeddings
    for tensors in ({"head": embedding.clone(), "embedding": embedding}, {"embedding": embedding}):
        assert read_architecture(tied(tmp_path, **tensors)).tie_word_embeddings


def test_transformers_reads_two_heads_as_untied(tmp_path: Path) -> None:
    """The folder that is refused: transformers goes by its weights, against its config.json."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder(tmp_path)))
    torch.nn.init.normal_(model.lm_head.weight)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(theirs.lm_head.weight, model.lm_head.weight)
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        read_architecture(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "null", "\ufeff{}", '{"a": ' * 100_000, '{"a": ' + "9" * 5000 + "}", "\x00"],
)
def test_a_config_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    for read in (
        lambda: read_architecture(tmp_path, weights=False),
        lambda: folder_vocab_size(str(tmp_path)),
        lambda: model_config(str(tmp_path)),
    ):
        with pytest.raises(ModelError, match=r"config\.json"):
            read()


@pytest.mark.parametrize("size", ["31", True, 1.5, -1, [], float("nan"), {}])
def test_a_size_is_refused_by_every_reader(size: Any, tmp_path: Path) -> None:
    for changes in (
        {"vocab_size": size},
        {"vocab_size": None, "text_config": {"vocab_size": size}},
    ):
        with pytest.raises(ModelError, match="vocab_size: got"):
            folder_vocab_size(str(folder(tmp_path, **changes)))
    with pytest.raises(ModelError, match="vocab_size: got"):
        read_architecture(folder(tmp_path, vocab_size=size))
    if size != -1:
        with pytest.raises(
            ModelError, match=r"config\.json is refused by transformers.*vocab_size"
        ):
            model_config(str(tmp_path))
