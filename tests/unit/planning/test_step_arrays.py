"""The planned bytes of a step on rank 0 beside the arrays of real samples and batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch

from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample, VersionSpan
from rlcore.planning.host import WAITING_STEPS, StepArrays
from rlcore.runs.recorder import MOST_UNWRITTEN

PROMPT = 7
LENGTHS = (12, 30, 8)
LAYERS = 3
TOP_K = 2


def make_sample(index: int, length: int, *, routed: bool) -> Sample:
    trainable = length - PROMPT
    return Sample(
        draw=index,
        index=0,
        prompt_id="rows:1",
        group_id=index,
        rollout_id=index,
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=(np.arange(length) >= PROMPT).astype(np.uint8),
        rollout_logprobs=np.full(trainable, -1.0, dtype=np.float32),
        versions=(VersionSpan(1, 0, trainable),),
        finish_reason="stop",
        routed_experts=np.zeros((length, LAYERS, TOP_K), dtype=np.int16) if routed else None,
    )


def num_bytes(batch: RolloutBatch) -> int:
    arrays = [batch.tokens, batch.cu_tokens, batch.cu_seqlens, batch.loss_mask]
    arrays += batch.vectors.values()
    arrays += [] if batch.routed_experts is None else [batch.routed_experts]
    arrays += [] if batch.versions is None else [batch.versions.values, batch.versions.lengths]
    return sum(array.nbytes for array in arrays)


def arrays_of(samples: Iterable[Sample]) -> int:
    names = ("tokens", "loss_mask", "rollout_logprobs", "routed_experts")
    found = (getattr(sample, name) for sample in samples for name in names)
    return sum(array.nbytes for array in found if array is not None)


@pytest.mark.parametrize("routed", [False, True], ids=["plain", "routed_experts"])
def test_bytes_of_samples_and_batch(*, routed: bool) -> None:
    samples = [make_sample(k, length, routed=routed) for k, length in enumerate(LENGTHS)]
    planned = StepArrays(
        sequences=len(LENGTHS),
        tokens=sum(LENGTHS),
        trainable=sum(LENGTHS) - PROMPT * len(LENGTHS),
        vectors=0,
        routed=LAYERS * TOP_K if routed else 0,
    )
    batch = RolloutBatch.from_samples(samples)
    assert arrays_of(samples) == planned.samples
    assert num_bytes(batch) == planned.batch

    for name in ("logprobs", "advantages", "weights"):
        batch.set(name, torch.zeros(batch.num_trainable))
    step = replace(planned, vectors=3)
    assert num_bytes(batch) == step.held
    assert planned.step == planned.samples + planned.batch, "before the step has vectors"
    assert replace(planned, vectors=30).step > planned.step
    assert WAITING_STEPS == MOST_UNWRITTEN
    assert step.waiting == MOST_UNWRITTEN * step.held


def test_supervised_samples_keep_their_logprobs() -> None:
    samples = [make_sample(k, length, routed=False) for k, length in enumerate(LENGTHS)]
    planned = StepArrays(
        sequences=len(LENGTHS),
        tokens=sum(LENGTHS),
        trainable=sum(LENGTHS) - PROMPT * len(LENGTHS),
        vectors=0,
        sampled=False,
    )
    batch = RolloutBatch.from_samples(samples)
    batch.lend_arrays(samples)
    del batch.vectors["rollout_logprobs"]
    batch.versions = None
    own = sum(sample.rollout_logprobs.nbytes for sample in samples)
    assert num_bytes(batch) + own == planned.held
