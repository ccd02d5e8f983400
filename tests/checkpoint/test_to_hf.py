"""Checkpoints of two ranks become Hugging Face folders, bit for bit, and no model is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import MODELS, write_model
from plan import LAYOUTS
from world_outputs import read_weights

from backends.megatron.convert.read import read_architecture
from backends.megatron.cpu.shim import importing_megatron
from tests.parity.spawn import run_ranks

with importing_megatron():
    from backends.megatron.checkpoint.to_hf import checkpoint_to_hf
from rlcore.errors import ModelError
from tests.peak_bytes import peak_bytes

SAVED_UNDER = {
    "llama": "tp2",  # whose vocabulary is padded
    "llama_tied": "pp2",
    "qwen2": "tp2_sequence",
    "qwen2_tied": "vpp2",
    "qwen2_mqa": "tp2",
    "qwen3": "pp2_uneven",
    "qwen3_tied": "dp2",
    "qwen2_moe": "ep2",
    "qwen3_moe": "ep2_etp1",
    "mixtral": "cp2",
    "deepseek_v3": "ep2",
    "deepseek_v32": "tp2_sequence",
    "deepseek_v3_plain": "tp2_sequence",
    "minimax_m2": "tp2_sequence",
    "gpt_oss": "ep2_etp1",
    "gemma3_text": "tp2_sequence",
    "gemma3": "pp2",
    "olmo3": "tp2",
    "gemma4": "tp2_sequence",
    "reward": "tp2",
    "glm4_moe": "ep2",
    "glm4_moe_lite": "tp2_sequence",
    "seed_oss": "tp2",
    "smollm3": "pp2",
    "mistral3": "tp2",
    "qwen3_next": "ep2",
    "qwen3_5": "tp2_sequence",
    "qwen3_5_moe": "cp2",
    "nemotron_h": "ep2",
    "nemotron_h_dense": "tp2_sequence",
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of all models, and their checkpoints."""
    root = tmp_path_factory.mktemp("to_hf")
    payload: list[dict[str, Any]] = []
    for name, layout in SAVED_UNDER.items():
        case = {
            "source": str(write_model(name, root / "models" / name)),
            "save": str(root / "checkpoints" / name),
            "dtype": "bf16" if MODELS[name][2] == torch.bfloat16 else "fp32",
            "head": "value" if name == "reward" else "lm",
        }
        payload.append({"layout": LAYOUTS[layout], "cases": [("save_weights", case)]})
    run_ranks(
        Path(__file__).with_name("world_ranks.py"), 2, root / "world", payload, deadline_s=240
    )
    return root


@pytest.mark.parametrize("name", MODELS)
def test_the_folder_that_was_loaded_comes_out(
    name: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.nn.Module, "__init__", no_model)
    source = root / "models" / name
    arch = read_architecture(source)
    checkpoint = root / "checkpoints" / name
    checkpoint_to_hf(checkpoint, tmp_path / "hf", arch, dtype=MODELS[name][2])
    before = read_weights(source)
    after = read_weights(tmp_path / "hf")
    assert before
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], tensor), key
    assert (tmp_path / "hf" / "tokenizer.json").exists()


def no_model(*_: object, **__: object) -> None:
    raise AssertionError("an export needs no model")


def test_it_is_converted_to_the_models_dtype(root: Path, tmp_path: Path) -> None:
    arch = read_architecture(root / "models" / "qwen3")
    checkpoint = root / "checkpoints" / "qwen3"
    checkpoint_to_hf(checkpoint, tmp_path / "hf", arch, dtype=torch.bfloat16)
    for key, tensor in read_weights(root / "models" / "qwen3").items():
        assert torch.equal(read_weights(tmp_path / "hf")[key], tensor.bfloat16())


def test_another_model_is_refused(root: Path, tmp_path: Path) -> None:
    arch = read_architecture(root / "models" / "qwen3")
    with pytest.raises(ModelError, match="policy was saved with family 'qwen2', this model has"):
        checkpoint_to_hf(root / "checkpoints" / "qwen2", tmp_path / "hf", arch, dtype=torch.float32)
    assert not (tmp_path / "hf").exists()


def test_memory_for_a_few_parameters(root: Path, tmp_path: Path) -> None:
    """One that is read, a saved box of it and its shuffled rows."""
    source = root / "models" / "qwen3"
    arch = read_architecture(source)
    peak = peak_bytes(
        lambda: checkpoint_to_hf(
            root / "checkpoints" / "qwen3", tmp_path / "hf", arch, dtype=torch.float32
        )
    )
    weights = read_weights(source).values()
    largest = max(tensor.nbytes for tensor in weights) * 2  # gate and up are one parameter
    assert largest * 3 < sum(tensor.nbytes for tensor in weights)
    assert 0 < peak < largest * 3
