"""Functions over tensors that torch's compiler fuses into one kernel on CUDA.

A chain of operations over a large tensor then reads and writes it once. If the compiler does not
work, a function runs operation by operation, with the same values up to rounding.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

log = logging.getLogger(__name__)


def fuses(device: torch.device) -> bool:
    """Whether functions over tensors of `device` are compiled.

    A deterministic run compiles nothing: the compiler chooses by time between forms of a kernel
    that sum in different orders.
    """
    return (
        device.type == "cuda"
        and not torch.are_deterministic_algorithms_enabled()
        and why_not() is None
    )


@cache
def why_not() -> str | None:
    """The reason why the compiler does not work here; None if it works."""
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1" or os.environ.get("TORCHDYNAMO_DISABLE"):
        return "torch.compile is switched off by the environment"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "cc", "clang"]
    if not any(shutil.which(name) for name in compilers):
        return f"there is no C compiler ({', '.join(compilers)}), which triton needs"
    return None


def fused_kernels(device: torch.device) -> str:
    """A line that says whether head and activation are compiled on `device`, or why not."""
    if fuses(device):
        return "head and activation fused by torch.compile"
    reason = why_not() or "the run is deterministic"
    return f"head and activation operation by operation, which is slower: {reason}"


class Fused:
    """A function of tensors that is compiled at its first call.

    Check `fuses` before a call: on other devices, code that reuses memory is better. A kernel
    serves tensors of all sizes; a kernel of `over_rows` serves one width, and is up to three times
    as fast on tensors that are parts of others.
    """

    def __init__(self, function: Callable[..., Any], *, rows_only: bool = False) -> None:
        self._plain = function
        self._rows_only = rows_only
        self._chosen: Callable[..., Any] | None = None

    @classmethod
    def over_rows(cls, function: Callable[..., Any]) -> Fused:
        """Make kernels for tensors that differ only in their first size."""
        return cls(function, rows_only=True)

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; if the compiler fails, log that once and continue without it."""
        if self._chosen is None:
            import torch._inductor.config as inductor

            # There are few kernels, and every rank would start its own workers.
            inductor.compile_threads = 1
            self._chosen = torch.compile(self._plain, dynamic=not self._rows_only)
        if self._rows_only and self._chosen is not self._plain:
            for tensor in arguments:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        try:
            return self._chosen(*arguments)
        except RuntimeError as error:
            from torch._dynamo.exc import TorchDynamoException

            if self._chosen is self._plain or not isinstance(error, TorchDynamoException):
                raise
            log.warning(
                "%s runs operation by operation, which is slower, since torch.compile failed: %s",
                self._plain.__name__,
                " ".join(str(error).split())[:300],
            )
            self._chosen = self._plain
            return self._plain(*arguments)
