from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_kit import tiny_qwen3
from transformers import Qwen3ForCausalLM


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model() -> Qwen3ForCausalLM:
    return tiny_qwen3()


@pytest.fixture(scope="session")
def folder(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Only the config: the engine must not find weights to read."""
    path = tmp_path_factory.mktemp("qwen3")
    model.config.save_pretrained(path)
    return path
