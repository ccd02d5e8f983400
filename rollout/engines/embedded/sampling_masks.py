"""Records sampling masks: the tokens that top-k and top-p left, while responses are being made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlcore.data.sample import SamplingMasks


class SamplingMaskRecorder:
    """The sampling masks, in host memory, of R responses that grow by one token a step."""

    def __init__(self) -> None:
        self._rows: list[
            NDArray[np.int64]
        ] = []  # of each step: the rows that have a mask, ascending
        self._counts: list[NDArray[np.int64]] = []
        self._tokens: list[NDArray[np.int32]] = []

    def add(self, kept: Tensor | None, alive: Tensor, active: Tensor | None) -> None:
        """Record the masks of one step.

        Args:
            kept: bool [A, V]; None: no row was truncated.
            alive: bool [A]: rows whose response has not ended.
            active: int64 [A]: the rows' numbers among the R; None: all of them, in order.
        """
        if kept is None:
            rows = alive.new_zeros(0)
            counts = alive.new_zeros(0)
            tokens = alive.new_zeros(0)
        else:
            masked = alive & ~kept.all(-1)  # the whole vocabulary is not written out
            places = masked.nonzero()[:, 0]
            some = kept[places]
            rows = places if active is None else active[places]
            counts = some.sum(-1)
            tokens = some.nonzero()[:, 1]
        self._rows.append(rows.cpu().numpy())
        self._counts.append(counts.cpu().numpy())
        self._tokens.append(tokens.to(torch.int32).cpu().numpy())

    def masks(self, lengths: Sequence[int]) -> list[SamplingMasks]:
        """The masks of each of the R responses, which are `lengths` tokens long."""
        counts = np.zeros((len(lengths), len(self._rows)), dtype=np.int32)
        pieces: list[list[NDArray[np.int32]]] = [[] for _ in lengths]
        for step, (rows, sizes, tokens) in enumerate(zip(self._rows, self._counts, self._tokens)):
            counts[rows, step] = sizes
            for row, piece in zip(rows.tolist(), np.split(tokens, sizes.cumsum()[:-1])):
                pieces[row].append(piece)
        nothing = np.zeros(0, dtype=np.int32)
        return [
            SamplingMasks(np.concatenate([nothing, *piece]), row[:length].copy())
            for piece, row, length in zip(pieces, counts, lengths)
        ]
