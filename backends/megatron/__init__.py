"""The policy backend on Megatron-Core: tensor, pipeline, sequence and data parallelism, on CUDA and on the CPU.

Importing this package imports neither torch nor Megatron; asking it for `MegatronBackend` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backends.megatron.backend import MegatronBackend

__all__ = ["MegatronBackend"]


def __getattr__(name: str) -> Any:
    if name != "MegatronBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from backends.megatron.backend import MegatronBackend

    return MegatronBackend
