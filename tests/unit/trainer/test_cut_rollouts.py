"""Cutting rollouts into segments changes nothing: from samples to the gradient of a model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
import torch

from rlcore.algorithms import (
    AggregationMode,
    PolicyLoss,
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
from tests.unit.algorithms import reference_losses

VOCABULARY = 11
# A sequence of these is a segment, and clip_cov draws tokens by their place in it.
WIDE = {"clip_low": 0.02, "clip_high": 0.03}  # some tokens are clipped, and some are not
BY_SEGMENT: dict[str, dict[str, Any]] = {
    "gspo": WIDE,
    "gspo_token": WIDE,
    "geo_mean": WIDE,
    "clip_cov": {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 100.0},
}
LABELS = {"sft"}  # has no rollouts
# Sums to go of a rollout and of its segments are the same without a discount: see
# test_rollouts.py.
UNDISCOUNTED: dict[str, dict[str, Any]] = {"ppo": {"lam": 1.0}, "vapo": {"actor_lam": 1.0}}
PARTS = ("right", "short")
NORM_LENGTH = 9
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
    scores = np.random.default_rng([seed, 1])
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
                reward_parts={name: float(scores.integers(0, 3)) for name in PARTS[b == 4 :]},
                token_rewards=scores.random(size).astype(np.float32),
                baseline_reward=0.5, metadata={"correct": b % 2 == 0}, measured={"turns": 2.0 + b},
            )
        )  # fmt: skip
    return made


def cut(sample: Sample, choose: random.Random) -> list[Sample]:
    """Cut into segments: each holds all tokens up to its own, which alone are trainable in it."""
    size = sample.num_trainable
    assert sample.token_rewards is not None
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
                token_rewards=sample.token_rewards[start:end],
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


@dataclass(frozen=True)
class Step:
    """A whole step of one optimizer step."""

    model: Model
    batch: RolloutBatch
    loss: PolicyLoss
    metrics: dict[str, float]

    @property
    def gradient(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def values_of(batch: RolloutBatch) -> torch.Tensor:
    """A critic's values: of all tokens before each trainable one."""
    parts = batch.tokens.double().split(batch.lengths.tolist())
    return torch.cat([torch.sin(part.cumsum(0) - part) for part in parts])[batch.loss_mask]


def step(samples: Sequence[Sample], algorithm: dict[str, Any]) -> Step:
    config = Config.model_validate({
        "run": {"name": "x"}, "model": {"path": "m"}, "data": {"paths": ["d"]},
        "training": {"steps": 1}, "rollout": {"workflow": "env"}, "algorithm": algorithm,
        "reward": {"parts": {name: {"function": "math"} for name in PARTS}},
    })  # fmt: skip
    model = Model()
    objective = Objective(config.algorithm)
    assignment = CreditAssignment(config, objective)
    batch = RolloutBatch.from_samples(samples, reward_parts=assignment.reward_parts)
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
        "values": values_of(batch),
    }.items():
        batch.set(name, value)
    everything = [list(range(batch.num_sequences))]
    stats = assignment.assign(batch, everything)
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
    return Step(
        model, batch, result, {k: v for k, v in metrics.items() if not k.startswith("perf/")}
    )


def loss_config(name: str, mode: str) -> dict[str, Any]:
    norm = {"norm_length": NORM_LENGTH} if mode == "seq-mean-token-sum-norm" else {}
    return {"name": name, "aggregation": mode} | norm


def check(seed: int, algorithm: dict[str, Any]) -> None:
    whole = rollouts(seed)
    if not any(sample.num_trainable for sample in whole):
        return
    expected = step(whole, algorithm)
    got = step(cut_all(whole, seed), algorithm)
    torch.testing.assert_close(got.gradient, expected.gradient, atol=1e-7, rtol=1e-6)
    assert got.metrics == pytest.approx(expected.metrics, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("mode", get_args(AggregationMode))
@pytest.mark.parametrize(
    "name", [n for n in policy_loss_names() if n not in {*BY_SEGMENT} | LABELS]
)
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_no_gradient_and_no_metric_moves_with_any_loss(name: str, mode: str, seed: int) -> None:
    """With KL, entropy bonus and a limit of age; a conversation's loss counts rollouts once."""
    check(
        seed,
        {
            "estimator": {"name": "grpo"}, "loss": loss_config(name, mode), "entropy_coef": 0.01,
            "kl": {"loss_coef": 0.1}, "correction": {"name": "tis", "max_staleness": 1},
        },
    )  # fmt: skip


@pytest.mark.parametrize("name", estimator_names())
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_no_gradient_moves_with_any_estimator(name: str, seed: int) -> None:
    """With rewards of turns, parts of the reward, and the critic's explained variance."""
    estimator = {"name": name, **UNDISCOUNTED.get(name, {})}
    check(seed, {"estimator": estimator, "loss": {"aggregation": "seq-mean-token-mean"}})


def weights_by_hand(batch: RolloutBatch, mode: str) -> list[list[float]]:
    """The weight of each token of each sequence, by the table of docs/algorithms.md."""
    lengths = batch.num_trainable_each
    owners = batch.vectors["rollout_ids"].tolist()
    of_rollout: Counter[int] = Counter()
    for owner, length in zip(owners, lengths):
        of_rollout[owner] += length
    count = sum(size > 0 for size in of_rollout.values())
    found = []
    for owner, length in zip(owners, lengths):
        denominator = {
            "token-mean": sum(lengths),
            "seq-mean-token-mean": count * of_rollout[owner],
            "seq-mean-token-sum": count,
            "seq-mean-token-sum-norm": count * NORM_LENGTH,
        }[mode]
        found.append([1 / denominator for _ in range(length)])
    return found


def sequences_of(batch: RolloutBatch, logprobs: torch.Tensor) -> list[reference_losses.Sequence]:
    vectors = [
        logprobs.detach(),
        *(batch.vectors[name] for name in ("old_logprobs", "rollout_logprobs", "advantages")),
    ]
    rows = zip(*(vector.double().split(batch.num_trainable_each) for vector in vectors))
    ids = batch.vectors["sequence_ids"].tolist()
    return [
        reference_losses.Sequence(identity, *(part.tolist() for part in row))
        for identity, row in zip(ids, rows)
    ]


@pytest.mark.parametrize("mode", get_args(AggregationMode))
@pytest.mark.parametrize("name", BY_SEGMENT)
@pytest.mark.parametrize("seed", SEEDS[1:3])
def test_a_sequence_of_some_losses_is_a_segment(name: str, mode: str, seed: int) -> None:
    """Of a ratio, that is, or of a draw; weights and advantages are those of the rollout."""
    options = BY_SEGMENT[name]
    algorithm = {"loss": loss_config(name, mode) | options}
    for samples in (rollouts(seed), cut_all(rollouts(seed), seed)):
        got = step(samples, algorithm)
        model = Model()
        logprobs = model(got.batch)
        rows = reference_losses.REFERENCES[name](sequences_of(got.batch, logprobs), **options)
        slopes = [
            sum(weight * of_token[u] for weight, of_token in zip(weights, jacobian))
            for weights, (_, jacobian) in zip(weights_by_hand(got.batch, mode), rows)
            for u in range(len(weights))
        ]
        logprobs.backward(torch.tensor(slopes, dtype=torch.float64))
        expected = [p.grad for p in model.parameters()]
        assert max(float(p.abs().max()) for p in got.gradient) > 1e-3
        torch.testing.assert_close(got.gradient, expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", BY_SEGMENT)
def test_it_is_all_the_same_to_them_where_no_rollout_is_cut(name: str) -> None:
    """Counting rollouts or samples; and that they are in the list above is right."""
    found = []
    for per_rollout, samples in ((True, rollouts(2)), (False, rollouts(2))):
        loss = {"name": name, "aggregation": "seq-mean-token-mean", "per_rollout": per_rollout}
        found.append(step(samples, {"loss": loss | BY_SEGMENT[name]}).gradient)
    torch.testing.assert_close(found[1], found[0], atol=0, rtol=0)
    with pytest.raises(AssertionError, match="not close"):
        check(2, {"loss": loss_config(name, "seq-mean-token-mean") | BY_SEGMENT[name]})


@pytest.mark.parametrize("seed", SEEDS)
def test_clip_cov_draws_as_many_of_the_same_tokens(seed: int) -> None:
    """The covariances of a step, who is eligible and how many are drawn; not which of them."""
    drawn = {"loss": {"name": "clip_cov"} | BY_SEGMENT["clip_cov"]}
    sides = [step(s, drawn).loss.metrics for s in (rollouts(seed), cut_all(rollouts(seed), seed))]
    whole, segments = sides
    torch.testing.assert_close(segments["covariance"], whole["covariance"], atol=1e-7, rtol=0)
    assert 0 < segments["cov_clipfrac"].sum() == whole["cov_clipfrac"].sum()
    for side in sides:
        assert bool((side["covariance"][side["cov_clipfrac"] == 1] > 0).all())
    # where all who are eligible are drawn, nothing is left to chance
    everyone = BY_SEGMENT["clip_cov"] | {"clip_cov_ratio": 1.0}
    check(seed, {"loss": {"name": "clip_cov"} | everyone})


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
