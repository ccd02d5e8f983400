"""What the updates of a step did to each trainable token, for the record of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlcore.algorithms import PolicyLoss, PolicyLossInputs

NAMES = ("ratio", "clipped")
LARGEST_LOG_RATIO = 20.0


class UpdateRecord:
    """Ratio and clip of the tokens of this rank at their last update.

    It takes two numbers a token, on the device, until the batch is dropped.
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[Tensor]] = {}  # of a mini-batch, [2, m] each

    def begin(self, minibatch: int) -> None:
        """Forget an earlier epoch's update on a mini-batch."""
        self._parts[minibatch] = []

    def add(self, minibatch: int, inputs: PolicyLossInputs, result: PolicyLoss) -> None:
        """Record a micro-batch; they come in order."""
        moved = inputs.logprobs.detach() - inputs.old_logprobs
        ratio = moved.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        clipped = result.metrics.get("clipfrac")
        if clipped is None or clipped.shape != ratio.shape:  # a loss that does not clip
            clipped = torch.zeros_like(ratio)
        self._parts.setdefault(minibatch, []).append(
            torch.stack([ratio.float(), clipped.detach().float()])
        )

    def vectors(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return both vectors over all mini-batches; NaN where none was trained.

        Args:
            sizes: trainable tokens of this rank in each mini-batch.
        """
        parts = []
        for minibatch, size in enumerate(sizes):
            found = self._parts.get(minibatch, [])
            parts.append(
                torch.cat([part.cpu() for part in found], dim=1)
                if found
                else torch.full((len(NAMES), size), math.nan)
            )
        return list(torch.cat(parts, dim=1)) if parts else [torch.zeros(0) for _ in NAMES]
