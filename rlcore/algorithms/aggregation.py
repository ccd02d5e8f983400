"""The aggregation of a loss as one weight a token: the loss is `sum(w_t * l_t)`, however split."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

from rlcore.algorithms.errors import known_names
from rlcore.algorithms.ragged import expand_to_tokens, group_index, segment_lengths
from rlcore.algorithms.types import check_cu_seqlens

if TYPE_CHECKING:
    from torch import Tensor

AggregationMode = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


def loss_weights(
    mode: AggregationMode,
    cu_seqlens: Tensor,
    *,
    norm_length: float | None = None,
    rollout_ids: Tensor | None = None,
) -> Tensor:
    """Return the weight of each token of an optimizer step, float32 `[M]`.

    It must be computed before the step is split.

        token-mean                1 / M
        seq-mean-token-mean       1 / (N * tokens of the sequence)
        seq-mean-token-sum        1 / N
        seq-mean-token-sum-norm   1 / (N * norm_length)                 Dr. GRPO, arXiv:2503.20783

    N counts the sequences that have a trainable token. With `rollout_ids` (integer `[B]`),
    sequences of one rollout count as one long sequence: one in N, and one shared denominator of
    tokens. Only the last mode reads `norm_length`, which it requires.
    """
    modes = get_args(AggregationMode)
    if mode not in modes:
        raise ValueError(f"mode: unknown aggregation {mode!r}; {known_names(str(mode), modes)}")
    check_cu_seqlens(cu_seqlens)
    lengths = segment_lengths(cu_seqlens)
    if rollout_ids is not None:
        if tuple(rollout_ids.shape) != tuple(lengths.shape):
            raise ValueError(
                f"rollout_ids: expected shape [B] = {list(lengths.shape)}, got"
                f" {list(rollout_ids.shape)}"
            )
        rollout, num_rollouts = group_index(rollout_ids)
        lengths = lengths.new_zeros(num_rollouts).index_add(0, rollout, lengths)[rollout]
        num_sequences = int(torch.unique(rollout[lengths > 0]).numel())
    else:
        num_sequences = int((lengths > 0).sum())

    if mode == "token-mean":
        denominator = torch.full_like(lengths, int(cu_seqlens[-1]), dtype=torch.float64)
    elif mode == "seq-mean-token-mean":
        denominator = lengths.double() * num_sequences
    elif mode == "seq-mean-token-sum":
        denominator = torch.full_like(lengths, num_sequences, dtype=torch.float64)
    else:
        if norm_length is None or not norm_length > 0:
            raise ValueError(
                f"norm_length: expected a number > 0 for mode {mode!r}, got {norm_length}"
            )
        denominator = torch.full_like(lengths, num_sequences, dtype=torch.float64) * norm_length
    return expand_to_tokens(denominator.reciprocal().float(), cu_seqlens)
