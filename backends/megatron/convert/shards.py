"""Which safetensors file of a folder holds which tensor. Nothing here needs torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlcore.errors import ModelError

INDEX = "model.safetensors.index.json"


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, by the index or from the files' headers.

    Raises:
        ModelError: the index or a file cannot be read.
    """
    index = folder / INDEX
    if index.is_file():
        try:
            return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ModelError(f"{index}: not a safetensors index: {error}") from error
    names: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with open_shard(path, "numpy") as shard:
            names.update(dict.fromkeys(shard.keys(), path.name))
    return names


def open_shard(path: Path, framework: str) -> Any:
    """Open a file for reading, as a context manager.

    Raises:
        ModelError: the file is missing or cannot be read.
    """
    if not path.is_file():
        raise ModelError(f"{path.parent}: shard {path.name} is missing; {INDEX} names it")
    try:
        return safe_open(path, framework=framework, device="cpu")
    except SafetensorError as error:
        raise ModelError(
            f"{path}: not a readable safetensors file ({error}); copy the folder again"
        ) from error
