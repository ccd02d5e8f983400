"""Keep-sets and routed experts in samples and batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcore.data.batch import BatchSamplingMasks, RolloutBatch
from rlcore.data.sample import Sample, SamplingMasks
from rlcore.errors import DataError
from rlcore.runs.rollouts import read_rollouts, write_rollouts
from rlcore.trainer.sources import ReplaySource

MakeSample = Callable[..., Sample]


def sets_of(*sets: list[int]) -> SamplingMasks:
    tokens = np.array([token for one in sets for token in one], dtype=np.int32)
    return SamplingMasks(tokens, np.array([len(one) for one in sets], dtype=np.int32))


def test_their_counts_are_checked() -> None:
    with pytest.raises(ValueError, match="counts sum up to 3, but there are 2 tokens"):
        SamplingMasks(np.zeros(2, dtype=np.int32), np.array([1, 2], dtype=np.int32))
    with pytest.raises(ValueError, match="tokens must be one int32 vector, got int64"):
        SamplingMasks(np.zeros(2, dtype=np.int64), np.array([1, 1], dtype=np.int32))  # type: ignore[arg-type]


def test_turns_are_joined() -> None:
    joined = SamplingMasks.joined([sets_of([4], []), SamplingMasks.whole(1), sets_of([1, 2])])
    assert joined.counts.tolist() == [1, 0, 0, 2]
    assert joined.tokens.tolist() == [4, 1, 2]
    assert SamplingMasks.joined([]).counts.tolist() == []


def test_a_token_must_be_in_its_set(make_sample: MakeSample) -> None:
    make_sample(sampling_mask=sets_of([9, 3], [], [2]))
    with pytest.raises(
        ValueError, match="keep-set of trainable token 2 does not hold the token itself"
    ):
        make_sample(sampling_mask=sets_of([9, 3], [], [9, 10]))
    with pytest.raises(
        ValueError, match="2 keep-sets, expected one for each of 3 trainable tokens"
    ):
        make_sample(sampling_mask=sets_of([9, 3], []))


def test_a_record_brings_them_back(make_sample: MakeSample, tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    write_rollouts(path, 1, [make_sample(sampling_mask=sets_of([9, 3], [], [2])), make_sample(1)])
    first, second = (Sample.from_record(record) for record in read_rollouts(path))
    assert first.sampling_mask is not None
    assert first.sampling_mask.counts.dtype == np.int32
    assert first.sampling_mask.tokens.tolist() == [9, 3, 2]
    assert second.sampling_mask is None


def test_a_replay_has_them_where_they_are_configured_and_only_there(
    make_sample: MakeSample, tmp_path: Path
) -> None:
    path = tmp_path / "step.parquet"
    write_rollouts(path, 1, [make_sample(sampling_mask=SamplingMasks.whole(3))])
    asked = {"sampling_mask": "policy.logprobs.keep_sets"}
    assert ReplaySource(path, vocab_size=1000, recorded=asked).samples[0].sampling_mask is not None
    with pytest.raises(
        DataError, match=r"recorded with keep_sets: set policy.logprobs.keep_sets to true"
    ):
        ReplaySource(path, vocab_size=1000)
    write_rollouts(path, 1, [make_sample(sampling_mask=SamplingMasks.whole(3)), make_sample(1)])
    with pytest.raises(
        DataError,
        match=r"recorded without keep_sets, which policy.logprobs.keep_sets needs: turn it off",
    ):
        ReplaySource(path, vocab_size=1000, recorded=asked)


def test_a_batch_holds_one_set_a_trainable_token_and_keeps_it_when_cut(
    make_sample: MakeSample,
) -> None:
    nothing = {
        "loss_mask": np.zeros(5, dtype=np.uint8),
        "rollout_logprobs": np.zeros(0, dtype=np.float32),
        "versions": (),
    }
    samples = [
        make_sample(0),
        make_sample(1, sampling_mask=SamplingMasks.whole(0), **nothing),
        make_sample(2, sampling_mask=sets_of([9, 3], [], [2])),
        make_sample(3, sampling_mask=sets_of([9], [10], [1, 2])),
    ]
    batch = RolloutBatch.from_samples(samples)
    assert batch.sampling_mask is not None
    assert batch.sampling_mask.offsets.tolist() == [0, 0, 0, 0, 2, 2, 3, 4, 5, 7]
    part = batch.select([3, 1, 2]).sampling_mask
    assert part is not None
    assert part.offsets.tolist() == [0, 1, 2, 4, 6, 6, 7]
    assert part.tokens.tolist() == [9, 10, 1, 2, 9, 3, 2]
    assert RolloutBatch.from_samples(samples[:1]).sampling_mask is None
    with pytest.raises(
        ValueError, match=r"batch\.sampling_mask holds 2 sets, expected one for each of 9 tokens"
    ):
        RolloutBatch(batch.tokens, batch.cu_tokens, batch.loss_mask,
                     sampling_mask=BatchSamplingMasks(torch.zeros(0),
                                                      torch.zeros(3,
                                                                  dtype=torch.int64)))  # fmt: skip


# --- routed experts -------------------------------------------------------------------------------


def experts(size: int, first: int) -> np.ndarray:
    return np.arange(first, first + 2 * size, dtype=np.int16).reshape(size, 1, 2)


def test_a_record_of_experts_comes_back(make_sample: MakeSample, tmp_path: Path) -> None:
    path = tmp_path / "step.parquet"
    write_rollouts(path, 1, [make_sample(routed_experts=experts(4, -1)), make_sample(1)])
    first, second = (Sample.from_record(record) for record in read_rollouts(path))
    assert first.routed_experts is not None
    assert first.routed_experts.dtype == np.int16
    np.testing.assert_array_equal(first.routed_experts, experts(4, -1))
    assert second.routed_experts is None
    with pytest.raises(
        DataError,
        match=r"recorded without routed_experts, which policy\.routing_replay needs: turn it off",
    ):
        ReplaySource(path, vocab_size=1000, recorded={"routed_experts": "policy.routing_replay"})


def test_tokens_without_a_record_say_so_in_a_batch(make_sample: MakeSample) -> None:
    samples = [
        make_sample(0),
        make_sample(1, routed_experts=experts(4, 10)),
        make_sample(2, routed_experts=experts(2, 30)),
    ]
    # aborted before the first token
    samples[0].routed_experts = np.zeros((0, 0, 0), dtype=np.int16)
    batch = RolloutBatch.from_samples(samples)
    assert batch.routed_experts is not None
    firsts = [-1] * 5 + [10, 12, 14, 16, -1] + [30, 32, -1, -1, -1]
    assert batch.routed_experts[:, 0, 0].tolist() == firsts
    part = batch.select([2, 0]).routed_experts
    assert part is not None
    assert part[:, 0, 1].tolist() == [31, 33, -1, -1, -1] + [-1] * 5
    assert RolloutBatch.from_samples(samples[:1]).routed_experts is None


def test_a_record_of_another_shape_is_refused(make_sample: MakeSample) -> None:
    for wrong in (experts(6, 0), experts(2, 0)[:, 0], experts(2, 0).astype(np.int32)):
        with pytest.raises(
            ValueError, match=r"routed_experts must be int16 \[t, layers, k\], t at most 5, got "
        ):
            make_sample(routed_experts=wrong)
