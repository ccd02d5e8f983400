"""Comparison of an engine's log-probs with the trainer's: its contents, its times, its words."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rlcore.config.load import load_config
from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample
from rlcore.trainer.engine_check import PASS, EngineCheck

MakeSample = Callable[..., Sample]
GAP = "rollout/train_rollout_logprob_diff"
VERSION = 5  # made the last two of the three tokens of every sample; version 4 made the first


def check_of(*overrides: str) -> EngineCheck | None:
    given = (
        "run.name=x",
        "model.path=m",
        "data.paths=d.jsonl",
        "training.steps=1",
        "reward.parts.a.function=exact_match",
    )
    return EngineCheck.of(load_config([], [*given, *overrides]).config)


@pytest.fixture
def samples(make_sample: MakeSample) -> list[Sample]:
    return [make_sample(0), make_sample(1, prompt_id="train.jsonl:2", response_text="57")]


@pytest.fixture
def batch(samples: list[Sample]) -> RolloutBatch:
    """Two samples of three tokens, scored by a trainer that agrees."""
    batch = RolloutBatch.from_samples(samples)
    batch.version = VERSION
    batch.set(f"{PASS}logprobs", batch.vectors["rollout_logprobs"].clone())
    return batch


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (["model.dtype=fp32"], 1e-3),
        (["model.dtype=bf16"], 0.1),
        (["model.dtype=fp32", "rollout.engine.dtype=bf16"], 0.1),
        (["model.dtype=bf16", "rollout.engine.dtype=fp32"], 0.1),
        (["rollout.engine.max_logprob_diff=0.5"], 0.5),
        (["rollout.engine.logprobs_every=0"], None),
        (["algorithm.loss.name=sft", "data.label_key=answer"], None),
        (["training.debug=train_only", "training.replay=x.zst"], None),
    ],
)
def test_the_limit_follows_from_the_coarser_dtype(given: list[str], limit: float | None) -> None:
    check = check_of(*given)
    assert (check and check.limit) == limit


def test_the_first_step_and_every_few_are_due() -> None:
    check = check_of("rollout.engine.logprobs_every=4")
    assert check is not None
    assert [step for step in range(7, 18) if check.is_due(step)] == [7, 8, 12, 16]
    assert [step for step in range(7, 18) if check.is_first(step)] == [7]


def test_equal_log_probs_are_right(batch: RolloutBatch, samples: list[Sample]) -> None:
    metrics, trouble = EngineCheck(1e-3, 20, "sglang").compare(batch, samples, {})
    assert (metrics[GAP], trouble) == (0.0, "")


def test_a_difference_names_the_engine_the_worst_response_and_the_causes(
    batch: RolloutBatch, samples: list[Sample]
) -> None:
    batch.vectors[f"{PASS}logprobs"] += torch.tensor([0.0, 0.0, 0.01, 0.0, 0.7, 0.01])
    check = EngineCheck(1e-3, 20, "sglang")
    metrics, trouble = check.compare(batch, samples, {})
    assert metrics[GAP] == pytest.approx(0.72 / 4)
    assert metrics[f"{GAP}_max"] == pytest.approx(0.7)
    for part in ("engine sglang by 0.18 nats", "tokens of policy step 5", "0.001",
                 "max_logprob_diff", "'57'", "train.jsonl:2", "temperature", "older weights",
                 "rollout.engine.dtype"):  # fmt: skip
        assert part in trouble
    assert EngineCheck(0.2, 20, "sglang").compare(batch, samples, {})[1] == ""


def test_one_engine_that_is_wrong_is_not_averaged_away(
    batch: RolloutBatch, samples: list[Sample]
) -> None:
    """The second of two differs by 0.3 nats: 0.15 on average, below the limit."""
    batch.vectors[f"{PASS}logprobs"] += torch.tensor([0.0, 0.0, 0.0, 0.0, 0.3, 0.3])
    check = EngineCheck(0.2, 20, "sglang")
    assert check.compare(batch, samples, {})[1] == ""
    metrics, trouble = check.compare(batch, samples, {0: "engine-0", 1: "engine-1"})
    assert metrics[GAP] == pytest.approx(0.15)
    assert "those of engine engine-1 by 0.3 nats" in trouble
    assert "engine-0" not in trouble


def test_a_pass_that_the_step_needs_anyway_is_what_is_compared(
    batch: RolloutBatch, samples: list[Sample]
) -> None:
    batch.set("logprobs", batch.vectors["rollout_logprobs"] + 1.0)
    assert "by 1 nats" in EngineCheck(1e-3, 20, "embedded").compare(batch, samples, {})[1]


def test_tokens_of_older_versions_may_differ(batch: RolloutBatch, samples: list[Sample]) -> None:
    batch.vectors[f"{PASS}logprobs"][[0, 3]] += 3.0
    metrics, trouble = EngineCheck(1e-3, 20, "sglang").compare(batch, samples, {})
    assert (metrics[GAP], trouble) == (0.0, "")
    batch.version = VERSION + 1
    assert EngineCheck(1e-3, 20, "sglang").compare(batch, samples, {}) == ({}, "")


def test_what_is_no_number_is_a_difference(batch: RolloutBatch, samples: list[Sample]) -> None:
    batch.vectors[f"{PASS}logprobs"][5] = math.nan
    metrics, trouble = EngineCheck(100.0, 20, "sglang").compare(batch, samples, {})
    assert math.isnan(metrics[GAP])
    assert "nan nats" in trouble
    assert "train.jsonl:2" in trouble
