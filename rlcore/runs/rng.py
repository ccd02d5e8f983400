"""The global random number generators of the process, for third-party code that uses them."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np


def rng_state() -> dict[str, Any]:
    """Return the state of python's, numpy's and, if loaded, torch's generators (CPU and CUDA).

    It is fit for `encode_state`.
    """
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {
            "kind": kind,
            "keys": keys,
            "position": position,
            "has_gauss": has_gauss,
            "gauss": gauss,
        },
    }
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

        torch.manual_seed(seed)  # CUDA's too


def restore_rng(state: Mapping[str, Any]) -> None:
    """Restore the state. A CUDA device that the state lacks keeps its generator."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    saved = state["numpy"]
    np.random.set_state(
        (saved["kind"], saved["keys"], saved["position"], saved["has_gauss"], saved["gauss"])
    )
    if "torch" in state:
        import torch

        torch.set_rng_state(torch.from_numpy(state["torch"]))
        for device, saved_device in enumerate(state.get("cuda", ())):
            if device < torch.cuda.device_count():
                torch.cuda.set_rng_state(torch.from_numpy(saved_device), device)
