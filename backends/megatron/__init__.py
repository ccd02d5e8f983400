"""The policy backend on Megatron-Core, on CUDA and on the CPU.

Importing this package imports neither torch nor Megatron; using one of its names does. Only
`MegatronBackend` needs Megatron: `ParallelState.from_mpu` and `compute_advantages_and_returns` work
without it, with a stub of `megatron.core.mpu`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backends.megatron.advantages import compute_advantages_and_returns
    from backends.megatron.backend import MegatronBackend
    from backends.megatron.parallel.state import ParallelState

__all__ = ["MegatronBackend", "ParallelState", "compute_advantages_and_returns"]

_MODULES = {
    "MegatronBackend": "backend",
    "ParallelState": "parallel.state",
    "compute_advantages_and_returns": "advantages",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
