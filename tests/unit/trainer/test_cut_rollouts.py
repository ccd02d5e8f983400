"""Cutting rollouts into segments changes nothing: from samples to the gradient of a model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rlcore.algorithms import (
    AggregationMode,
    PolicyLossInputs,
    estimator_names,
    policy_loss_names,
)
from rlcore.config import Config
from rlcore.data.batch import RolloutBatch, StepRollouts
from rlcore.data.sample import Sample, VersionSpan
from rlcore.trainer.credit import CreditAssignment, fields_of
from rlcore.trainer.objective import Objective
from rlcore.trainer.step_metrics import step_metrics
from rollout.collection.filters import FilterChain

VOCABULARY = 11
# A sequence of these is a segment, and clip_cov draws tokens by their place in it.
BY_SEGMENT = {"gspo", "gspo_token", "geo_mean", "clip_cov"}
LABELS = {"sft"}  # has no rollouts
# Where the place of a token counts, only sums without a discount can be the same; GAE needs values,
# of which the end of a segment has one of its own.
BY_PLACE = {"ppo", "vapo"}
OWN_KEYWORDS = {"gdpo"}  # needs parts of the reward
SEEDS = range(6)


class Model(torch.nn.Module):
    """Log-probs of tokens behind all tokens before them."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = torch.nn.Parameter(
            torch.randn(VOCABULARY, 4, generator=generator, dtype=torch.float64)
        )
        self.head = torch.nn.Parameter(
            torch.randn(4, VOCABULARY, generator=generator, dtype=torch.float64)
        )

    def forward(self, batch: RolloutBatch) -> torch.Tensor:
        found = []
        for tokens in batch.tokens.long().split(batch.lengths.tolist()):
            behind = torch.tanh(self.embedding[tokens].cumsum(0)[:-1] / 3) @ self.head
            logprobs = behind.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
            found.append(torch.cat([logprobs.new_zeros(1), logprobs]))
        return torch.cat(found)[batch.loss_mask]


def rollouts(seed: int) -> list[Sample]:
    """Two groups of three rollouts, of which some have no trainable token."""
    choose = np.random.default_rng(seed)
    made = []
    for b in range(6):
        size = int(choose.integers(0, 8))
        tokens = choose.integers(0, VOCABULARY, 2 + size).astype(np.int32)
        half = size // 2
        made.append(
            Sample(
                draw=b // 3, index=b % 3, prompt_id="p", group_id=b // 3, rollout_id=b,
                tokens=tokens, loss_mask=np.array([0, 0] + [1] * size, dtype=np.uint8),
                rollout_logprobs=-choose.random(size).astype(np.float32),
                versions=(VersionSpan(4, 0, half), VersionSpan(5, half, size)),
                finish_reason="length" if b % 2 else "stop", reward=float(choose.integers(0, 3)),
                baseline_reward=0.5, metadata={"correct": b % 2 == 0}, measured={"turns": 2.0 + b},
            )
        )  # fmt: skip
    return made


def cut(sample: Sample, choose: random.Random) -> list[Sample]:
    """Cut into segments: each holds all tokens up to its own, which alone are trainable in it."""
    size = sample.num_trainable
    borders = sorted([0, size, *(choose.randint(0, size) for _ in range(choose.randint(0, 2)))])
    parts = []
    for start, end in pairwise(borders):
        shown = 2 + end
        mask = np.zeros(shown, dtype=np.uint8)
        mask[2 + start :] = 1
        versions = [
            VersionSpan(s.version, max(s.start, start) - start, min(s.end, end) - start)
            for s in sample.versions
            if max(s.start, start) <= min(s.end, end)
        ]
        parts.append(
            replace(
                sample, tokens=sample.tokens[:shown], loss_mask=mask,
                rollout_logprobs=sample.rollout_logprobs[start:end], versions=tuple(versions),
                finish_reason=sample.finish_reason if end == size else "stop",
                measured={} if parts else sample.measured,
            )
        )  # fmt: skip
    parts[-1] = replace(parts[-1], finish_reason=sample.finish_reason)
    return parts


def cut_all(samples: Sequence[Sample], seed: int) -> list[Sample]:
    choose = random.Random(seed)
    parts = [part for sample in samples for part in cut(sample, choose)]
    return [replace(part, index=i) for i, part in enumerate(parts)]


def step(
    samples: Sequence[Sample], algorithm: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The gradient of a whole step, and its metrics."""
    config = Config.model_validate({
        "run": {"name": "x"}, "model": {"path": "m"}, "data": {"paths": ["d"]},
        "training": {"steps": 1}, "rollout": {"workflow": "env"}, "algorithm": algorithm,
    })  # fmt: skip
    model = Model()
    batch = RolloutBatch.from_samples(samples)
    batch.version = 6
    with torch.no_grad():
        logprobs = model(batch)
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)[
        batch.tokens.long()[batch.loss_mask]
    ]
    for name, value in {
        "logprobs": logprobs - 0.3 * noise,
        "ref_logprobs": logprobs + 0.1 * noise,
        "entropy": noise.abs(),
    }.items():
        batch.set(name, value)
    objective = Objective(config.algorithm)
    everything = [list(range(batch.num_sequences))]
    stats = CreditAssignment(config, objective).assign(batch, everything)
    given = fields_of(PolicyLossInputs, batch) | {"logprobs": model(batch)}
    if objective.loss.has_batch_stats:
        prefix = "batch_stats/0/"
        given["batch_stats"] = {
            name.removeprefix(prefix): v for name, v in stats.items() if name.startswith(prefix)
        }
    result = objective(PolicyLossInputs(cu_seqlens=batch.cu_seqlens, **given))
    (result.per_token * batch.vectors["weights"]).sum().backward()
    made = StepRollouts(list(samples), {}, epoch=1.0, snapshot={})
    metrics = step_metrics(
        config, made, batch, [], {"step": 1.0, "generation": 0.5}, episodes=batch.num_rollouts
    )
    gradient = [p.grad for p in model.parameters() if p.grad is not None]
    return gradient, {k: v for k, v in metrics.items() if not k.startswith("perf/")}


def check(seed: int, algorithm: dict[str, Any]) -> None:
    whole = rollouts(seed)
    if not any(sample.num_trainable for sample in whole):
        return
    expected, metrics = step(whole, algorithm)
    got, again = step(cut_all(whole, seed), algorithm)
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)
    assert again == pytest.approx(metrics, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("mode", get_args(AggregationMode))
@pytest.mark.parametrize("name", [n for n in policy_loss_names() if n not in BY_SEGMENT | LABELS])
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_no_gradient_and_no_metric_moves_with_any_loss(name: str, mode: str, seed: int) -> None:
    """With KL, entropy bonus and a limit of age; a conversation's loss counts rollouts once."""
    loss: dict[str, Any] = {"name": name, "aggregation": mode}
    if mode == "seq-mean-token-sum-norm":
        loss["norm_length"] = 9
    check(
        seed,
        {
            "estimator": {"name": "grpo"}, "loss": loss, "entropy_coef": 0.01,
            "kl": {"loss_coef": 0.1}, "correction": {"name": "tis", "max_staleness": 1},
        },
    )  # fmt: skip


@pytest.mark.parametrize("name", [n for n in estimator_names() if n not in BY_PLACE | OWN_KEYWORDS])
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_no_gradient_moves_with_any_estimator(name: str, seed: int) -> None:
    check(
        seed,
        {"estimator": {"name": name}, "loss": {"aggregation": "seq-mean-token-mean"}},
    )


def test_the_loss_of_single_samples_is_another_one() -> None:
    """So the tests above see what they should: here each sample counts."""
    algorithm = {"loss": {"aggregation": "seq-mean-token-mean", "per_rollout": False}}
    with pytest.raises(AssertionError, match="not close"):
        check(3, algorithm)


@pytest.mark.parametrize("seed", SEEDS)
def test_filters_see_rollouts(seed: int) -> None:
    whole = rollouts(seed)
    for name in ("zero_variance", "mixed_verdicts"):
        chain = FilterChain([name], samples_per_prompt=3)
        for group in (0, 1):
            sides = [
                chain.refusal([s for s in samples if s.group_id == group])
                for samples in (whole, cut_all(whole, seed))
            ]
            assert sides[0] == sides[1]
