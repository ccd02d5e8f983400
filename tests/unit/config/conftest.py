from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlcore.config.load import Loaded, load_config
from rlcore.errors import ConfigError

MINIMAL = ("run.name=test", "model.path=model", "data.paths=data.jsonl", "training.steps=1")
Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a file and return its path."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


@pytest.fixture
def load() -> Callable[..., Loaded]:
    """Load overrides (and files) over the smallest configuration that is complete."""

    def with_minimum(*overrides: str, files: Any = ()) -> Loaded:
        return load_config(files, [*MINIMAL, *overrides])

    return with_minimum


@pytest.fixture
def refusal(load: Callable[..., Loaded]) -> Callable[..., list[str]]:
    """The lines of the error that overrides are refused with."""

    def lines(*overrides: str, files: Any = ()) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            load(*overrides, files=files)
        return str(caught.value).splitlines()

    return lines
