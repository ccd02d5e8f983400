"""No metric depends on padding, tool output, the order of sequences, or the split of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from rlcore.algorithms import METRICS, Moments, PolicyLossInputs, approx_kl, metric_spec
from rlcore.config import Config
from rlcore.data.batch import RolloutBatch, StepRollouts, UpdateResult
from rlcore.data.sample import Sample, VersionSpan
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.objective import Objective
from rlcore.trainer.step_metrics import step_metrics, update_metrics

LENGTHS = (5, 1, 0, 17, 4, 2, 9, 3)  # trainable tokens; the first is token id 1, and so on
SIZE = sum(LENGTHS)
SCORED = ("logprobs", "ref_logprobs", "entropy", "values")
GENERATOR = np.random.default_rng(7)
# by token id
TRUTH = {
    name: np.append(np.nan, GENERATOR.normal(size=SIZE)) for name in (*SCORED, "after", "engine")
}
TRUTH["logprobs"] = -np.abs(TRUTH["logprobs"])
TRUTH["engine"] = (TRUTH["logprobs"] + 0.3 * TRUTH["engine"]).astype(np.float32)
TRUTH["after"] = TRUTH["logprobs"] + 0.2 * TRUTH["after"]
TRUTH["entropy"] = np.abs(TRUTH["entropy"])
Split = Sequence[Sequence[int]]


@pytest.fixture(scope="module")
def config() -> Config:
    return Config.model_validate({
        "run": {"name": "metrics"}, "model": {"path": "unused"}, "data": {"paths": ["unused"]},
        "training": {"steps": 1}, "algorithm": {
            "estimator": {"name": "ppo"},
            "loss": {"name": "ppo_clip", "dual_clip": 3.0, "aggregation": "seq-mean-token-mean"},
            "kl": {"reward_coef": 0.05},
            "entropy_coef": 0.01,
            "correction": {"name": "mis", "level": "geometric", "lower": 0.9, "upper": 1.1,
                           "veto": 0.55, "max_staleness": 1},
        },
    })  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Where the sequences stand and what surrounds their trainable tokens."""

    order: tuple[int, ...] = tuple(range(len(LENGTHS)))
    prompt: int = 1
    pad: int = 0
    tools: int = 0  # tokens of tool output after every second trainable token


def sample(b: int, layout: Layout) -> Sample:
    """Sequence b; ids of tokens that nobody trains on are 0."""
    first = sum(LENGTHS[:b]) + 1
    ids = [0] * layout.prompt
    mask = [0] * layout.prompt
    for t in range(first, first + LENGTHS[b]):
        ids = [*ids, t]
        mask = [*mask, 1]
        if (t - first) % 2:
            ids = ids + [0] * layout.tools
            mask = mask + [0] * layout.tools
    ids = ids + [0] * layout.pad
    mask = mask + [0] * layout.pad
    half = LENGTHS[b] // 2
    return Sample(
        draw=b // 2, index=b % 2, prompt_id=f"p:{b // 2}", group_id=b // 2, rollout_id=b,
        tokens=np.array(ids, dtype=np.int32), loss_mask=np.array(mask, dtype=np.uint8),
        rollout_logprobs=TRUTH["engine"][first : first + LENGTHS[b]].astype(np.float32),
        versions=(VersionSpan(4 + b % 3, 0, half), VersionSpan(6, half, LENGTHS[b])),
        finish_reason="length" if b % 3 else "stop", reward=float(b % 4),
        metadata={"correct": b % 2 == 0},
    )  # fmt: skip


def scores(batch: RolloutBatch, name: str) -> torch.Tensor:
    """Return scores [M] as of a model: a number at every slot, NaN at prompt tokens."""
    everywhere = torch.from_numpy(TRUTH[name].astype(np.float64))[batch.tokens.long()]
    return everywhere[batch.loss_mask]


def ready(config: Config, layout: Layout) -> RolloutBatch:
    """The batch of a step when the optimizer gets it."""
    batch = RolloutBatch.from_samples([sample(b, layout) for b in layout.order])
    batch.version = 6
    for name in SCORED:
        batch.set(name, scores(batch, name))
    CreditAssignment(config, Objective(config.algorithm)).assign(
        batch, [list(range(batch.num_sequences))]
    )
    return batch


def loss_inputs(part: RolloutBatch, policy: str) -> PolicyLossInputs:
    """Return a micro-batch's inputs of the objective; `policy` names its forward log-probs."""
    names = ("old_logprobs", "advantages", "weights", "rollout_logprobs", "ref_logprobs", "entropy")
    given: dict[str, Any] = {name: part.vectors[name] for name in names}
    return PolicyLossInputs(cu_seqlens=part.cu_seqlens, logprobs=scores(part, policy), **given)


def run(config: Config, layout: Layout, ranks: Sequence[Split]) -> dict[str, float]:
    """Compute the metrics of a step; `ranks[r]` holds the micro-batches of data-parallel rank r."""
    batch = ready(config, layout)
    objective = Objective(config.algorithm)
    packed: list[tuple[list[str], torch.Tensor, torch.Tensor]] = []
    for micro_batches in ranks:
        moments = Moments()
        for rows in micro_batches:
            part = batch.select(rows)
            moments.add_objective(objective(loss_inputs(part, "after")), part.vectors["weights"])
            moments.add("step_kl", approx_kl(scores(part, "after"), scores(part, "logprobs"), "k2"))
        packed.append((moments.names, *moments.pack(moments.names)))
    # a rank without tokens knows the names too
    assert len({tuple(names) for names, _, _ in packed}) == 1
    sums = torch.stack([p[1] for p in packed]).sum(0)
    maxima = torch.stack([p[2] for p in packed]).amax(0)
    update = UpdateResult({}, Moments.unpack(packed[0][0], sums, maxima))
    rollouts = StepRollouts([sample(b, layout) for b in layout.order], {}, epoch=1.0, snapshot={})
    seconds = {"step": 1.0, "generation": 0.5}
    logged = step_metrics(config, rollouts, batch, [update], seconds, episodes=batch.num_sequences)
    # with those that a step of one update does not log: this one saw a policy that has moved
    metrics = update_metrics([update], batch, one_update=True) | logged
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def whole(count: int = len(LENGTHS)) -> list[Split]:
    return [[range(count)]]


def test_what_is_measured(config: Config) -> None:
    """The step at hand meets every metric of the policy and the rollouts, and none is broken."""
    metrics = run(config, Layout(), whole())
    assert all(np.isfinite(value) for value in metrics.values())
    assert all(metric_spec(name) is not None for name in metrics)
    sections = ("objective/", "policy/", "val/", "rollout/", "correction/", "loss/policy")
    elsewhere = {
        "rollout/reward_errors", "rollout/reward_timeouts", "rollout/requeued_prompts",
        "rollout/scored_samples", "rollout/failed_tries", "rollout/failed_groups",
        "rollout/excluded_prompts", "rollout/baseline_reward", "val/clipfrac_avg",
        "correction/clipped_fraction", "rollout/engine_restarts", "rollout/retried_requests",
        "rollout/overdue_requests", "rollout/unscored_samples",
        "rollout/draft_acceptance", "rollout/tokens_per_verification",
        "rollout/engines_serving", "rollout/resumed_responses", "rollout/resumed_tokens",
        "rollout/buffered_groups", "rollout/in_flight_groups", "rollout/dropped_stale",
    }  # fmt: skip
    assert {
        name for name in METRICS if name.startswith(sections) and "<" not in name
    } - elsewhere == {name for name in metrics if name.startswith(sections)}
    assert 0 < metrics["correction/masked_fraction"] < 1
    assert 0 < metrics["correction/vetoed_fraction"] < 1
    assert 0 < metrics["correction/stale_fraction"] < 1


@pytest.mark.parametrize("layout", [
    Layout(prompt=9), Layout(pad=13), Layout(tools=3), Layout(prompt=4, pad=7, tools=50),
    Layout(order=(7, 3, 2, 0, 6, 1, 5, 4)), Layout(order=(2, 4, 6, 0, 1, 3, 5, 7), pad=5, tools=2),
])  # fmt: skip
def test_no_metric_moves_with_padding_tool_output_or_order(config: Config, layout: Layout) -> None:
    assert run(config, layout, whole()) == pytest.approx(run(config, Layout(), whole()), rel=1e-9)


@pytest.mark.parametrize("ranks", [
    [[[0, 1, 2], [3, 4], [5, 6, 7]]],
    [[[b] for b in range(8)]],
    [[[7, 0], [3]], [[6, 5, 4], [1, 2]]],
    [[[0, 1, 3, 4, 5, 6, 7]], [[2]]],  # a rank whose only sequence is empty
    [[[0, 1, 2, 3, 4, 5, 6, 7], []], [[], []]],  # micro-batches and a rank without sequences
    [[[3]], [[0, 1], [2]], [[4, 5], [6]], [[7]]],
])  # fmt: skip
def test_no_metric_moves_with_the_split_over_ranks_and_micro_batches(
    config: Config, ranks: list[Split]
) -> None:
    assert run(config, Layout(), ranks) == pytest.approx(run(config, Layout(), whole()), rel=1e-12)


def test_the_logged_loss_is_what_is_minimised(config: Config) -> None:
    """`loss/policy_avg` and `objective/loss` by a loop over tokens, without stale and masked."""
    batch = ready(config, Layout())
    assert batch.versions is not None
    versions = batch.versions.each().tolist()
    vectors = {name: value.tolist() for name, value in batch.vectors.items()}
    after = scores(batch, "after").tolist()
    borders = batch.cu_seqlens.tolist()
    policy = 0.0
    total = 0.0
    for first, last in pairwise(borders):
        gaps = [
            a - b
            for a, b in zip(
                vectors["logprobs"][first:last], vectors["rollout_logprobs"][first:last]
            )
        ]
        if (
            not gaps
            or min(gaps) < math.log(0.55)
            or not 0.9 <= math.exp(sum(gaps) / len(gaps)) <= 1.1
        ):
            continue
        for t in range(first, last):
            ratio = math.exp(after[t] - vectors["logprobs"][t])
            advantage = vectors["advantages"][t]
            loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
            loss = min(loss, -3.0 * advantage) if advantage < 0 else loss
            weight = 0.0 if 6 - versions[t] > 1 else 1.0 / (len(gaps) * sum(n > 0 for n in LENGTHS))
            policy += weight * math.exp(sum(gaps) / len(gaps)) * loss
            total -= weight * 0.01 * vectors["entropy"][t]
    metrics = run(config, Layout(), whole())
    assert metrics["loss/policy_avg"] == pytest.approx(policy, rel=1e-6)
    assert metrics["objective/loss"] == pytest.approx(policy + total, rel=1e-6)


def test_one_update_measures_what_a_pass_before_it_does(config: Config) -> None:
    """If the update sees the batch first, its distances are those of the policy before the step."""
    batch = ready(config, Layout())
    moments = [Moments(), Moments()]
    for half, rows in zip(moments, ([0, 1, 2, 3], [4, 5, 6, 7])):
        part = batch.select(rows)
        loss = Objective(config.algorithm)(loss_inputs(part, "logprobs"))
        half.add_objective(loss, part.vectors["weights"])
    before = run(config, Layout(), whole())

    def seen(*, one_update: bool) -> dict[str, float]:
        return update_metrics(
            [UpdateResult({}, half) for half in moments], batch, one_update=one_update
        )

    found = seen(one_update=True)
    shared = [name for name in found if name.startswith("rollout/")] + [
        "objective/kl",
        "objective/entropy",
    ]
    assert {"rollout/ess", "rollout/kl", "rollout/train_rollout_logprob_diff_max"} < set(shared)
    for name in shared:
        assert found[name] == pytest.approx(before[name], rel=1e-12), name
    later = seen(one_update=False)  # the second update of several sees a policy that has moved
    assert not any(
        name.startswith(("rollout/", "objective/kl", "objective/entropy")) for name in later
    )
    assert later["objective/loss"] == pytest.approx(found["objective/loss"])
