"""Code that a model's folder brings is never run, and nobody is asked whether it may be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rlcore.data.tokenizer import load_tokenizer
from rlcore.errors import ModelError
from rollout.engines.checks import model_config
from rollout.engines.embedded.causal_lm import build_module

CODE = """
from pathlib import Path

Path({marker!r}).touch()

from transformers import LlamaConfig as Config, LlamaForCausalLM as Model
from transformers import PreTrainedTokenizerFast as Words
"""
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose classes are all its own."""
    (tmp_path / "own.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    config = {
        "model_type": "own",
        "vocab_size": 16,
        "auto_map": {
            "AutoConfig": "own.Config",
            "AutoModelForCausalLM": "own.Model",
            "AutoTokenizer": ["own.Words", "own.Words"],
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = {"auto_map": config["auto_map"], "tokenizer_class": "Words"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    return tmp_path


@pytest.mark.parametrize(
    "load",
    [
        load_tokenizer,
        lambda folder: model_config(str(folder)),
        lambda folder: build_module(str(folder), device=CPU, dtype=torch.float32),
    ],
    ids=["tokenizer", "config", "policy"],
)
def test_it_is_refused(
    folder: Path, load: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    with pytest.raises(ModelError, match=r"custom code|never run"):
        load(folder)
    assert not (folder / "ran").exists()
