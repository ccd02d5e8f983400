"""Tokens older than allowed: which they are, and that they lose their weight alone."""

from __future__ import annotations

import pytest
import torch

from rlcore.algorithms import (
    EstimatorInputs,
    InputError,
    loss_weights,
    mask_weights,
    rollout_metrics,
    stale_tokens,
    staleness_metrics,
)


def test_stale_tokens_by_hand() -> None:
    versions = torch.tensor([7, 6, 5, 4, 7])
    assert stale_tokens(versions, 7, 0).tolist() == [False, True, True, True, False]
    assert stale_tokens(versions, 7, 2).tolist() == [False, False, False, True, False]
    assert stale_tokens(versions, 9, 1).tolist() == [True] * 5
    assert stale_tokens(versions[:0], 7, 0).tolist() == []


def test_stale_tokens_lose_their_weight_and_the_others_keep_theirs() -> None:
    borders = torch.tensor([0, 2, 5])
    weights = loss_weights("seq-mean-token-mean", borders)
    masked = mask_weights(weights, stale_tokens(torch.tensor([3, 2, 3, 3, 1]), 3, 0))
    assert masked.tolist() == pytest.approx([1 / 4, 0.0, 1 / 6, 1 / 6, 0.0])
    assert weights.tolist() == pytest.approx([1 / 4] * 2 + [1 / 6] * 3)  # out of place


def test_wrong_versions_are_refused() -> None:
    versions = torch.tensor([1, 5])
    with pytest.raises(InputError, match="none above the current version 4, got 5"):
        stale_tokens(versions, 4, 0)
    with pytest.raises(
        ValueError, match="max_staleness: expected a number of versions >= 0, got -1"
    ):
        stale_tokens(versions, 5, -1)
    with pytest.raises(InputError, match=r"expected an integer dtype, got torch\.float32"):
        stale_tokens(versions.float(), 5, 0)
    with pytest.raises(
        InputError, match=r"dropped: expected bool of shape \[2\], got torch.bool \[3\]"
    ):
        mask_weights(torch.ones(2), torch.zeros(3, dtype=torch.bool))


def test_the_metrics_of_staleness() -> None:
    inputs = EstimatorInputs(
        cu_seqlens=torch.tensor([0, 1, 4]), rewards=torch.zeros(2), group_ids=torch.zeros(2).long(),
        versions=torch.tensor([7, 6, 5, 4]),
    )  # fmt: skip
    metrics = rollout_metrics(inputs, version=7, max_staleness=1)
    assert metrics["rollout/staleness_mean"] == 1.5
    assert metrics["rollout/staleness_max"] == 3.0
    assert metrics["correction/stale_fraction"] == 0.5
    assert "correction/stale_fraction" not in rollout_metrics(inputs, version=7)


def test_the_staleness_of_spans_is_that_of_their_tokens() -> None:
    versions = torch.tensor([7, 4, 6])
    lengths = torch.tensor([1, 5, 2])
    found = staleness_metrics(versions, 7, 1, lengths=lengths)
    assert found == staleness_metrics(versions.repeat_interleave(lengths), 7, 1)
    assert found["correction/stale_fraction"] == 5 / 8
    assert staleness_metrics(versions[:0], 7, 1, lengths=lengths[:0]) == {}
