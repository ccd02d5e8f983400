"""Verifies the weights of an engine that holds the tensors as they were sent."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.weights import combine_fingerprints, fingerprint


class FingerprintVerifier:
    """`rlcore.interfaces.WeightVerifier` for an engine with weights of `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sent: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Record a tensor that is sent."""
        self._sent[name] = fingerprint(tensor.to(self._dtype))

    def mismatch(self, reported: str) -> str | None:
        """Compare with the engine's checksum. Returns the difference, or None."""
        expected = combine_fingerprints(self._sent)
        return (
            None if reported == expected else f"checksum {reported[:12]}, expected {expected[:12]}"
        )
