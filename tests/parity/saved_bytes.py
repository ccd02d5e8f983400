"""How many bytes autograd holds for backward passes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class SavedBytes:
    """Counts the most bytes that autograd saves at once, in storages that are not in `apart`.

    A storage counts with its size at that time: a recomputed layer norm frees its output's memory
    and keeps the tensor.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        self.apart = {t.untyped_storage()._cdata for t in apart}
        self.saved: dict[int, list[Tensor]] = {}  # storage -> tensors in it that are saved
        self.peak = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: _Saved(t, self), lambda saved: saved.tensor
        )

    def __enter__(self) -> SavedBytes:
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.hooks.__exit__(*exception)

    def take(self, tensor: Tensor) -> None:
        self.saved.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
        self.peak = max(
            self.peak, sum(tensors[0].untyped_storage().nbytes() for tensors in self.saved.values())
        )

    def give_back(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        self.saved[key].pop()
        if not self.saved[key]:
            del self.saved[key]


class _Saved:
    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        self.tensor = tensor
        self.counter = counter
        self.counted = tensor.untyped_storage()._cdata not in counter.apart
        if self.counted:
            counter.take(tensor)

    def __del__(self) -> None:
        if self.counted:
            self.counter.give_back(self.tensor)
