"""Fixtures for every test."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repository() -> Path:
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: Qwen3, tied, 31 symbols, 2 layers of 32. Read it, do not write into it."""
    from rlcore.init_model import ModelSpec, init_model

    folder = tmp_path_factory.mktemp("tiny") / "model"
    init_model(folder, ModelSpec(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=64))
    return folder
