"""Samples whose arrays are views of their batch: the same values, held once, read-only."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import ARRAYS, Sample, SamplingMasks, VersionSpan

PROMPT = 3
Make = Callable[..., Sample]


@pytest.fixture
def plain(make_sample: Make) -> Make:
    """Samples of a number and of so many trainable tokens."""

    def make(number: int, m: int, **fields: Any) -> Sample:
        rng = np.random.default_rng(number)
        length = PROMPT + m
        return make_sample(
            number,
            tokens=rng.integers(0, 100, length).astype(np.int32),
            loss_mask=(np.arange(length) >= PROMPT).astype(np.uint8),
            rollout_logprobs=-rng.random(m).astype(np.float32),
            versions=(VersionSpan(1, 0, m),),
            **fields,
        )

    return make


@pytest.fixture
def with_everything(plain: Make) -> Make:
    """Sets that hold the drawn token and one more; a record of experts that ends one early."""

    def make(number: int, m: int) -> Sample:
        sample = plain(
            number,
            m,
            token_rewards=np.arange(m, dtype=np.float32),
            routed_experts=np.full((PROMPT + m - 1, 2, 2), number, dtype=np.int16),
        )
        drawn = sample.tokens[PROMPT:]
        sets = np.stack([drawn, drawn + 100], 1).ravel().astype(np.int32)
        sample.sampling_mask = SamplingMasks(sets, np.full(m, 2, dtype=np.int32))
        return sample

    return make


def arrays_of(sample: Sample) -> dict[str, Any]:
    found = {name: getattr(sample, name) for name in (*ARRAYS, "routed_experts")}
    if sample.sampling_mask is not None:
        found |= {"sets": sample.sampling_mask.tokens, "counts": sample.sampling_mask.counts}
    return found


def assert_same(samples: list[Sample], expected: list[Sample]) -> None:
    for got, wanted in zip(samples, expected, strict=True):
        for name, value in arrays_of(wanted).items():
            np.testing.assert_array_equal(arrays_of(got)[name], value, err_msg=name)
            if value is not None:
                assert arrays_of(got)[name].dtype == value.dtype, name


def test_the_values_stay(plain: Make, with_everything: Make) -> None:
    """One sample has nothing optional, one has no trainable token."""
    samples = [with_everything(0, 5), plain(1, 2), with_everything(2, 0), plain(3, 4)]
    expected = copy.deepcopy(samples)
    batch = RolloutBatch.from_samples(samples)
    batch.lend_arrays(samples)
    assert_same(samples, expected)
    assert_same(pickle.loads(pickle.dumps(samples)), expected)


def test_they_are_the_batchs_own_and_read_only(with_everything: Make) -> None:
    samples = [with_everything(0, 5), with_everything(1, 2)]
    batch = RolloutBatch.from_samples(samples)
    batch.lend_arrays(samples)
    held = {
        "tokens": batch.tokens,
        "loss_mask": batch.loss_mask,
        "rollout_logprobs": batch.vectors["rollout_logprobs"],
        "token_rewards": batch.vectors["token_rewards"],
        "routed_experts": batch.routed_experts,
        "sets": batch.sampling_mask.tokens,  # type: ignore[union-attr]
    }
    for name, whole in held.items():
        for sample in samples:
            assert np.shares_memory(arrays_of(sample)[name], whole.numpy()), name  # type: ignore[union-attr]
            with pytest.raises(ValueError, match="read-only"):
                arrays_of(sample)[name][:1] = 0


def test_nothing_keeps_what_the_samples_held_before(with_everything: Make) -> None:
    """Of a message that came in one piece a single view keeps all."""
    samples = [with_everything(0, 5), with_everything(1, 2)]
    before = [weakref.ref(value) for sample in samples for value in arrays_of(sample).values()]
    batch = RolloutBatch.from_samples(samples)
    batch.lend_arrays(samples)
    gc.collect()
    assert [ref() for ref in before if ref() is not None] == []


def test_what_the_batch_does_not_have_stays(plain: Make) -> None:
    samples = [plain(0, 5)]
    batch = RolloutBatch.from_samples(samples)
    own = samples[0].rollout_logprobs
    del batch.vectors["rollout_logprobs"]
    batch.lend_arrays(samples)
    assert samples[0].rollout_logprobs is own
