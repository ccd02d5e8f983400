"""Configurations of runs that differ in their data alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import Config


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Config]:
    """Make a configuration with these keys of `data`; its model has no folder."""

    def make(*, model: Path | None = None, max_new_tokens: int = 8, **data: Any) -> Config:
        return Config.model_validate(
            {
                "run": {"name": "x"},
                "model": {"path": str(model or tmp_path / "none")},
                "data": data,
                "rollout": {"sampling": {"max_new_tokens": max_new_tokens}},
                "training": {"steps": 1},
            }
        )

    return make
