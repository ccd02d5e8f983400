"""The digest of an engine that keeps the tensors as they come, from the trainer's end."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.weights import combine_fingerprints, fingerprint


class FingerprintVerifier:
    """`rlcore.interfaces.WeightVerifier` of an engine with weights of `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sent: dict[str, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        self._sent[name] = fingerprint(tensor.to(self._dtype))

    def mismatch(self, reported: str) -> str | None:
        expected = combine_fingerprints(self._sent)
        return (
            None if reported == expected else f"checksum {reported[:12]}, expected {expected[:12]}"
        )
