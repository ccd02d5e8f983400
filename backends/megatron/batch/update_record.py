"""The effect of a step's updates on the policy, for the recording and the metrics of the step."""

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

    The record keeps two numbers a token on the device until the batch is dropped, and the log-probs
    as a third in the mini-batch of the first update.
    """

    def __init__(self) -> None:
        # Mini-batch -> [2, m] for each of its micro-batches.
        self._parts: dict[int, list[Tensor]] = {}
        # The mini-batch of the first update, and the log-probs of its micro-batches under the
        # weights from before the step.
        self.first: int | None = None
        self.logprobs_before: list[Tensor] = []
        self._is_first = False
        # Whether the policy took an optimizer step.
        self.moved = False

    def begin(self, minibatch: int) -> None:
        """Forget an earlier epoch's update on a mini-batch."""
        self._is_first = self.first is None
        if self._is_first:
            self.first = minibatch
        self._parts[minibatch] = []

    def add_logprobs(self, logprobs: Tensor) -> None:
        """Keep the log-probs of a micro-batch if this is the first update; call in order."""
        if self._is_first:
            self.logprobs_before.append(logprobs.detach())

    def add(self, minibatch: int, inputs: PolicyLossInputs, result: PolicyLoss) -> None:
        """Record a micro-batch; call in order."""
        moved = inputs.logprobs.detach() - inputs.old_logprobs
        ratio = moved.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        clipped = result.metrics.get("clipfrac")
        # The loss does not clip.
        if clipped is None or clipped.shape != ratio.shape:
            clipped = torch.zeros_like(ratio)
        self._parts.setdefault(minibatch, []).append(
            torch.stack([ratio.float(), clipped.detach().float()])
        )

    def vectors(self, sizes: Sequence[int]) -> list[Tensor]:
        """Return both vectors over all mini-batches; NaN where no update was made.

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
