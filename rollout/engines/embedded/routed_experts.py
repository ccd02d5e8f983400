"""Records the experts that routers choose for each token that is fed to the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlcore.data.sample import Experts


class ExpertTap:
    """Records the arguments of a model's expert layers: transformers calls
    `experts(hidden, chosen, weights)`.
    """

    def __init__(self, module: nn.Module) -> None:
        experts = [part for name, part in module.named_modules() if name.endswith(".experts")]
        self.num_layers = len(experts)
        self._heard: list[Tensor] | None = None
        for part in experts:
            part.register_forward_pre_hook(self._hear)

    def _hear(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if self._heard is not None:
            self._heard.append(arguments[1])

    @contextmanager
    def listening(self) -> Iterator[list[Tensor]]:
        """Record a forward of [R, Q] tokens: the list then holds int64 [R * Q, k] a layer."""
        heard: list[Tensor] = []
        self._heard = heard
        try:
            yield heard
        finally:
            self._heard = None


class ExpertLog:
    """The records of R responses. A token keeps its first experts, even if recomputed later."""

    def __init__(self) -> None:
        # The record of each row's prompt; samples of a prompt share it.
        self._prompts: list[Experts] = []
        # (rows, [A, L, k]) of each response token that was fed
        self._steps: list[tuple[NDArray[np.int64], Experts]] = []

    def add_prompts(self, chosen: Tensor, pads: Sequence[int], copies: Sequence[int]) -> None:
        """Record prompts: int16 [texts, columns, L, k], padded on the left; row r has copies[r]."""
        texts = [text[pad:] for text, pad in zip(chosen.cpu().numpy(), pads)]
        self._prompts = [texts[copy] for copy in copies]

    def add_token(self, chosen: Tensor, active: Tensor | None) -> None:
        """Record each row's newest token: int16 [A, L, k]."""
        rows = np.arange(len(chosen)) if active is None else active.cpu().numpy()
        self._steps.append((rows, chosen.cpu().numpy()))

    def records(self, lengths: Sequence[int]) -> list[Experts]:
        """The record of each row; the last of its `lengths` response tokens was not fed."""
        if not self._prompts:
            return [np.zeros((0, 0, 0), dtype=np.int16) for _ in lengths]
        fed = np.full(
            (len(lengths), len(self._steps), *self._prompts[0].shape[1:]), -1, dtype=np.int16
        )
        for step, (rows, chosen) in enumerate(self._steps):
            fed[rows, step] = chosen
        return [
            np.concatenate([prompt, response[: max(length - 1, 0)]])
            for prompt, response, length in zip(self._prompts, fed, lengths)
        ]


def stacked(heard: Sequence[Tensor], rows: int) -> Tensor:
    """The record of a forward of [rows, Q] tokens, as int16 [rows, Q, L, k]."""
    layers = torch.stack([one.to(torch.int16) for one in heard], dim=1)
    return layers.view(rows, -1, *layers.shape[1:])
