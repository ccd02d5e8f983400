"""Run state as JSON: exact for all floats and for numpy arrays, strict about keys."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

_ARRAY = "__ndarray__"


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Encode nested mappings, lists, tuples (which come back as lists), scalars and numpy arrays.

    Raises:
        TypeError: anything else, named by its place. Also a key that is no string: JSON would turn
            it into one, and a resumed run would look it up in vain.
    """
    return json.dumps(_plain(state, "state")).encode()


def decode_state(content: bytes) -> dict[str, Any]:
    """Decode what `encode_state` made; ValueError for anything but a JSON object."""
    state = json.loads(content, object_hook=_restore)
    if not isinstance(state, dict):
        raise ValueError(f"expected a JSON object, got {type(state).__name__}")
    return state


def _plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"{where}: key {key!r} must be a string")
        return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        # Tokens and log-probs are long lists of plain numbers: no need to look at each.
        if all(type(item) in (int, float) for item in value):
            return list(value)
        return [_plain(item, f"{where}[{row}]") for row, item in enumerate(value)]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype != object:
        content = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_ARRAY: content, "dtype": value.dtype.str, "shape": list(value.shape)}
    raise TypeError(f"{where}: {type(value).__name__} cannot be part of a checkpoint's state")


def _restore(value: dict[str, Any]) -> Any:
    if _ARRAY not in value:
        return value
    flat = np.frombuffer(base64.b64decode(value[_ARRAY]), dtype=np.dtype(value["dtype"]))
    return flat.reshape(value["shape"]).copy()
