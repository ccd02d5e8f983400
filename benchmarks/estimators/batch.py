"""Makes ragged batches: log-normal lengths, and random numbers in the ranges of training."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlcore.algorithms import EstimatorInputs

# of the log of the lengths: the longest of 512 is some 14 times the mean
SIGMA = 1.0


@dataclass(frozen=True)
class Batch:
    """Vectors of one step, float32 and int64."""

    cu_seqlens: Tensor
    rewards: Tensor
    group_ids: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor
    rollout_logprobs: Tensor
    values: Tensor
    entropy: Tensor
    versions: Tensor

    @property
    def tokens(self) -> int:
        return self.values.numel()

    @property
    def sequences(self) -> int:
        return self.rewards.numel()

    @property
    def lengths(self) -> Tensor:
        return self.cu_seqlens.diff()

    def inputs(self, **fields: Tensor) -> EstimatorInputs:
        return EstimatorInputs(
            cu_seqlens=self.cu_seqlens, rewards=self.rewards, group_ids=self.group_ids, **fields
        )


def lengths_up_to(sequences: int, longest: int, seed: int = 0) -> Tensor:
    """Log-normal lengths, int64 `[B]`, the longest of which is exactly `longest` and the shortest
    at least 1.
    """
    drawn = _log_normal(sequences, seed)
    return (drawn / drawn.max() * longest).round().long().clamp(min=1)


def lengths_in_total(sequences: int, tokens: int, seed: int = 0) -> Tensor:
    """Log-normal lengths, int64 `[B]`, with some `tokens` tokens together and at least 1 each."""
    drawn = _log_normal(sequences, seed)
    return (drawn / drawn.sum() * tokens).round().long().clamp(min=1)


def make(lengths: Tensor, device: torch.device, *, group_size: int = 8, seed: int = 0) -> Batch:
    """A batch of these lengths; groups are neighbours."""
    generator = torch.Generator().manual_seed(seed)
    tokens = int(lengths.sum())
    sequences = lengths.numel()

    def normal(scale: float, size: int = tokens) -> Tensor:
        return (torch.randn(size, generator=generator) * scale).to(device)

    logprobs = -normal(1.0).abs()
    return Batch(
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device),
        rewards=normal(1.0, sequences),
        group_ids=torch.arange(sequences, device=device) // group_size,
        logprobs=logprobs,
        ref_logprobs=logprobs + normal(0.1),
        rollout_logprobs=logprobs + normal(0.01),
        values=normal(1.0),
        entropy=normal(1.0).abs(),
        versions=torch.zeros(tokens, dtype=torch.int64, device=device),
    )


def _log_normal(sequences: int, seed: int) -> Tensor:
    return (SIGMA * torch.randn(sequences, generator=torch.Generator().manual_seed(seed))).exp()
