"""Stand-in for `sgl_kernel`, of which no registry has a build for the CPU.

It registers no operators, from which SGLang concludes that there is no AMX, and takes the torch
forward of every layer. Any name can be imported; what is called says that it is not there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def __getattr__(name: str) -> Callable[..., Any]:
    # Python itself looks for such attributes of a module.
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build")

    return missing
