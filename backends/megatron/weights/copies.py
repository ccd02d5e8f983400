"""Copies of weights from one model into another, and frozen weights in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from backends.megatron.convert.layout import named_weights


class HostWeights:
    """Weights of the same shapes as some model's, in (on CUDA pinned) host memory."""

    @torch.no_grad()
    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self._weights = [_host_copy(p) for p in _weights(chunks)]
        # the model's own weights while these are in their place; allocated at the first swap
        self._aside: list[Tensor] = []

    @contextmanager
    def swapped_into(self, chunks: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, the weights of `chunks` are these; afterwards their own again, bit for bit.

        Everything is copied into existing storage: gradient and optimizer buffers are views of it.
        """
        if not self._aside:
            self._aside = [torch.empty_like(w, pin_memory=w.is_pinned()) for w in self._weights]
        with torch.no_grad():
            for aside, parameter in zip(self._aside, _weights(chunks)):
                aside.copy_(parameter)
        self.restore(chunks)
        try:
            yield
        finally:
            _fill(chunks, self._aside)

    def restore(self, chunks: Sequence[nn.Module]) -> None:
        """Write these weights into those of `chunks`."""
        _fill(chunks, self._weights)


def copy_weights(source: Sequence[nn.Module], target: Sequence[nn.Module]) -> None:
    """Copy every weight between models of one architecture and layout."""
    _fill(target, _weights(source))


@torch.no_grad()
def copy_trunk(source: Sequence[nn.Module], target: Sequence[nn.Module]) -> None:
    """Copy the weights that two models have in common: all but their heads."""
    for own, other in zip(target, source):
        given = dict(named_weights(other))
        for name, weight in named_weights(own):
            if name in given:
                weight.copy_(given[name])


@torch.no_grad()
def _fill(chunks: Sequence[nn.Module], weights: Sequence[Tensor]) -> None:
    for own, weight in zip(_weights(chunks), weights):
        own.copy_(weight)


def _weights(chunks: Sequence[nn.Module]) -> list[Tensor]:
    return [weight for chunk in chunks for _, weight in named_weights(chunk)]


def _host_copy(parameter: Tensor) -> Tensor:
    host = torch.empty(parameter.shape, dtype=parameter.dtype, pin_memory=parameter.is_cuda)
    return host.copy_(parameter)
