"""The state of a run in a checkpoint: exact JSON, and the process's random number generators.

The JSON is exact for all floats and for numpy arrays, and strict about keys. The generators are
the global ones, for third-party code that uses them.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

_ARRAY = "__ndarray__"
_NO_STATE = (LookupError, TypeError, OverflowError, MemoryError, RecursionError, SyntaxError)


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Encode nested mappings, lists, tuples (which come back as lists), scalars and numpy arrays.

    Raises:
        TypeError: a value of another type; names its path in the state. Also a key that is not a
            string: JSON would convert it, and a resumed run would not find it.
    """
    return json.dumps(_plain(state, "state")).encode()


def decode_state(content: bytes) -> dict[str, Any]:
    """Decode the output of `encode_state`. Raises ValueError for anything but a JSON object."""
    try:
        state = json.loads(content, object_hook=_restore)
    # An invalid array (numpy parses some types as syntax), or excessive nesting.
    except _NO_STATE as error:
        raise ValueError(f"no state: {error!r}") from error
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
        # Tokens and log-probs are long lists of plain numbers; skip the recursion.
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


def rng_state() -> dict[str, Any]:
    """Return the states of Python's, numpy's and, if loaded, torch's generators (CPU and CUDA).

    The result suits `encode_state`.
    """
    state: dict[str, Any] = {"python": random.getstate()}
    state["numpy"] = np.random.get_state(legacy=False)
    if "torch" in sys.modules:
        import torch

        state["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            state["cuda"] = [device.numpy() for device in torch.cuda.get_rng_state_all()]
    return state


def seed_rng(seed: int) -> None:
    """Seed every generator of `rng_state`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if "torch" in sys.modules:
        import torch

        # This seeds CUDA's generators too.
        torch.manual_seed(seed)


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the states. A CUDA device missing from `state` keeps its generator."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(state["numpy"])
    if "torch" in state:
        import torch

        torch.set_rng_state(torch.from_numpy(state["torch"]))
        for device, saved_device in enumerate(state.get("cuda", ())):
            if device < torch.cuda.device_count():
                torch.cuda.set_rng_state(torch.from_numpy(saved_device), device)
