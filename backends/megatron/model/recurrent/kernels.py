"""The choice of what computes the states of recurrent layers: a package's kernels, or torch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.table import GATED_DELTA, MAMBA_2

Library = Literal["fla", "mamba_ssm"]

PACKAGES = {kind.library: kind.package for kind in (GATED_DELTA, MAMBA_2)}


@dataclass(frozen=True)
class Kernels:
    """The choice of an implementation and its reason, which is printed when a run starts."""

    kind: Library | Literal["torch"]
    reason: str

    def __str__(self) -> str:
        name = "chunks of 64 in torch" if self.kind == "torch" else PACKAGES[self.kind]
        return f"{name} ({self.reason})"


def choose_kernels(
    library: Library, device: str, dtype: torch.dtype, *, installed: bool, deterministic: bool
) -> Kernels:
    """Choose the implementation for tensors of a device, "cpu" or "cuda", and dtype. Pure.

    Args:
        library: the one that has kernels for the layer.
        installed: its package is there.
    """
    package = PACKAGES[library]
    if device != "cuda":
        return Kernels("torch", f"{package} does not run on {device}")
    if not installed:
        return Kernels("torch", f"slower: the package {package} is not installed")
    if dtype not in (torch.float16, torch.bfloat16):
        return Kernels("torch", f"{package} takes half precision only")
    if deterministic:
        return Kernels("torch", f"run.deterministic: not proven for {package}")
    return Kernels(library, "installed")


def kernels_for(library: Library, device: torch.device, dtype: torch.dtype) -> Kernels:
    """Choose the implementation for tensors of this device and dtype, in this process."""
    # A dry run, whose tensors are on no device, computes in torch.
    return choose_kernels(
        library,
        device.type,
        dtype,
        installed=_installed(library),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


@cache
def _installed(library: Library) -> bool:
    return importlib.util.find_spec(library) is not None


def chosen_kernels(arch: Architecture, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The line about kernels at the start of a run; empty for a model without such layers."""
    if (kind := arch.table.recurrence) is None:
        return {}
    return {kind.name: str(kernels_for(kind.library, device, dtype))}
