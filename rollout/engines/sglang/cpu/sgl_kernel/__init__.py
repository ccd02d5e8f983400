"""Stand-in for `sgl_kernel`, of which no registry has a build for the CPU.

It lacks the operators from which SGLang concludes that there is AMX, so that SGLang takes the torch
forward of every layer that has one. Layers with a gated delta rule have none; `mamba` has their
functions. Any other name can be imported; what is called says that it is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .mamba import OPERATORS

for _operator in OPERATORS:
    setattr(torch.ops.sgl_kernel, _operator.__name__, _operator)


def __getattr__(name: str) -> Callable[..., Any]:
    # Python itself looks for such attributes of a module.
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build")

    return missing
