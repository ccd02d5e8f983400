"""Reading single keys of `config.json`. Imports neither torch nor Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlcore.errors import ModelError


def integer(folder: Path, config: Mapping[str, Any], *keys: str) -> int:
    """Read the first of `keys` that is given. Raises ModelError unless it is a positive integer."""
    value = next((config[key] for key in keys if config.get(key) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"{folder}/config.json: {' or '.join(keys)}: got {value!r}, expected a positive integer"
        )
    return value
