"""What rank 0 deals to the data-parallel ranks is what they hold, and comes back in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.batch.local_batch import ShardMap, _joined, _shares

from rlcore.data.batch import BatchSamplingMasks, RolloutBatch, TokenVersions
from rlcore.data.packing.plan import MinibatchPlan

LENGTHS = [3, 0, 5, 1, 4]
TRAINABLE = [2, 0, 4, 0, 1]
PLANS = [MinibatchPlan((((3, 0),), ((4,),), ((),))), MinibatchPlan((((1,),), ((2,),), ((),)))]


def batch() -> RolloutBatch:
    mask = torch.cat(
        [torch.arange(n) >= n - m for n, m in zip(LENGTHS, TRAINABLE)]
    )  # the last tokens of each
    m = sum(TRAINABLE)
    return RolloutBatch(
        tokens=torch.arange(sum(LENGTHS), dtype=torch.int32),
        cu_tokens=torch.tensor(np.cumsum([0, *LENGTHS])),
        loss_mask=mask,
        vectors={
            "sequence_ids": torch.arange(5) * 10,
            "rewards": torch.arange(5.0),
            "rollout_logprobs": -torch.arange(m, dtype=torch.float64),
        },
        sampling_mask=BatchSamplingMasks(
            torch.arange(9, dtype=torch.int32), torch.tensor([0, 2, 2, 3, 6, 8, 8, 9])
        ),
        routed_experts=torch.arange(sum(LENGTHS) * 2).reshape(-1, 2, 1).to(torch.int16),
        # a span over the border of two sequences
        versions=TokenVersions.of(torch.tensor([4, 5, 5, 5, 5, 6, 6])),
    )


def test_trainable_tokens_are_counted_for_empty_sequences_too() -> None:
    assert batch().num_trainable_each == TRAINABLE
    nothing = torch.zeros(0)
    empty = RolloutBatch(nothing.int(), torch.zeros(3, dtype=torch.int64), nothing.bool())
    assert empty.num_trainable_each == [0, 0]


def test_each_rank_gets_what_selecting_its_sequences_gives() -> None:
    whole = batch()
    shards = ShardMap.of(whole, PLANS, 3)
    assert shards.orders == ((3, 0, 1), (4, 2), ())
    assert shards.counts == [2, 5, 0]
    for order, share in zip(shards.orders, _shares(whole, shards)):
        own = {name: torch.cat([*parts]) for name, parts in share.items()}
        expected = whole.select(order)
        torch.testing.assert_close(own.pop("tokens"), expected.tokens)
        torch.testing.assert_close(own.pop("cu_tokens"), expected.cu_tokens)
        torch.testing.assert_close(own.pop("loss_mask"), expected.loss_mask)
        torch.testing.assert_close(own.pop("routed_experts"), expected.routed_experts)
        masks = expected.sampling_mask
        assert masks is not None
        torch.testing.assert_close(own.pop("mask_tokens"), masks.tokens)
        torch.testing.assert_close(own.pop("mask_offsets"), masks.offsets)
        versions = TokenVersions(own.pop("version_values"), own.pop("version_lengths"))
        assert expected.versions is not None
        torch.testing.assert_close(versions.each(), expected.versions.each())
        logprobs = own.pop("rollout_logprobs")
        torch.testing.assert_close(logprobs, expected.vectors["rollout_logprobs"].float())
        torch.testing.assert_close(own.pop("sequence_ids"), expected.vectors["sequence_ids"])
        assert not own, "rewards stay with rank 0"


def test_what_is_sent_is_no_second_copy() -> None:
    whole = batch()
    for share in _shares(whole, ShardMap.of(whole, PLANS, 3)):
        own = whole.tokens.untyped_storage().data_ptr()
        assert all(part.untyped_storage().data_ptr() == own for part in share["tokens"])


@pytest.mark.parametrize("of", [1, 2])
def test_what_rank_0_keeps_of_a_share_is_its_own(of: int) -> None:
    part = torch.arange(3.0)
    own = _joined([part] * of)
    own.zero_()
    assert part.tolist() == [0.0, 1.0, 2.0], "else an update of it would change the batch"


def test_split_vectors_are_joined_in_order() -> None:
    whole = batch()
    shards = ShardMap.of(whole, PLANS, 3)
    values = torch.arange(sum(TRAINABLE)) * 1.5
    parts = [torch.cat([*parts]) for parts in shards.split(values)]
    torch.testing.assert_close(shards.join(parts), values)


@pytest.mark.parametrize("order", [((3, 0),), ((3, 0, 1, 2, 4, 4),)])
def test_a_plan_that_loses_or_repeats_a_sequence_is_refused(order: tuple[tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="times, expected once"):
        ShardMap.of(batch(), [MinibatchPlan((order,))], 1)
