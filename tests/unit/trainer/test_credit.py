"""CreditAssignment: from scores and rewards to the vectors that the optimizer is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcore.algorithms import build_policy_loss, loss_weights, normalize_advantages
from rlcore.config import Config
from rlcore.data.batch import RolloutBatch
from rlcore.errors import RunFailed
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.objective import Objective

LENGTHS = (3, 1, 0, 4, 2, 2)  # trainable tokens of each sequence; the third has none
GROUPS = (7, 7, 9, 9, 7, 7)  # neighbours are no group
ROLLOUTS = (1, 1, 2, 3, 4, 4)
REWARDS = (1.0, 1.0, 5.0, 0.5, 2.0, 2.0)
EVERYTHING = [range(6)]


def make_config(algorithm: dict[str, Any] | None = None, **sections: Any) -> Config:
    given = {
        "run": {"name": "x"},
        "model": {"path": "m"},
        "data": {"paths": ["d"]},
        "training": {"steps": 1},
    }
    return Config.model_validate({**given, "algorithm": algorithm or {}, **sections})


def make_credit(algorithm: dict[str, Any] | None = None, **sections: Any) -> CreditAssignment:
    config = make_config(algorithm, **sections)
    return CreditAssignment(config, Objective(config.algorithm))


def make_batch(**vectors: Tensor) -> RolloutBatch:
    """Make sequences of one prompt token and trainable ones, of versions 3, 4, 5, 3, ..."""
    count = sum(LENGTHS)
    generator = torch.Generator().manual_seed(2)
    cu = torch.tensor([0, *(n + 1 for n in LENGTHS)]).cumsum(0)
    mask = torch.ones(int(cu[-1]), dtype=torch.bool)
    mask[cu[:-1]] = False
    given = {
        "rewards": torch.tensor(REWARDS),
        "group_ids": torch.tensor(GROUPS),
        "rollout_ids": torch.tensor(ROLLOUTS),
        "sequence_ids": torch.arange(6) * 11,
        "rollout_logprobs": -torch.rand(count, generator=generator),
        "logprobs": -torch.rand(count, generator=generator),
        "versions": torch.arange(count) % 3 + 3,
    }
    return RolloutBatch(
        torch.zeros(int(cu[-1]), dtype=torch.int32), cu, mask, {**given, **vectors}, version=5
    )


# --- advantages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["batch", "group", "none"])
def test_advantages_are_normalised_as_configured(mode: Any) -> None:
    given = {"estimator": {"name": "reinforce++", "gamma": 0.5}}
    raw = make_credit({**given, "normalize_advantages": "none"}).advantages(make_batch())
    got = make_credit({**given, "normalize_advantages": mode}).advantages(make_batch())
    expected = normalize_advantages(
        raw.advantages, make_batch().cu_seqlens, torch.tensor(GROUPS), mode
    )
    assert torch.equal(got.advantages, expected)
    assert torch.equal(got.advantages, raw.advantages) is (mode == "none")
    assert got.returns is not None
    assert raw.returns is not None
    assert torch.equal(got.returns, raw.returns), "the critic's targets are never normalised"


def test_normalisation_by_group_goes_by_identity() -> None:
    credit = make_credit(
        {"estimator": {"name": "reinforce++", "gamma": 0.5}, "normalize_advantages": "group"}
    )
    parts = credit.advantages(make_batch()).advantages.split(LENGTHS)
    for group in (7, 9):
        tokens = torch.cat([part for part, g in zip(parts, GROUPS) if g == group]).double()
        assert abs(float(tokens.mean())) < 1e-6
        assert float(tokens.std()) == pytest.approx(1.0, abs=1e-5)


def test_the_estimators_custom_is_the_default() -> None:
    names = ("ppo", "reinforce++", "grpo")
    assert [make_credit({"estimator": {"name": n}}).normalization for n in names] == [
        "batch",
        "batch",
        "none",
    ]


def test_distillation_is_a_reward_of_each_token() -> None:
    teacher = {"path": "t"}
    given = {"estimator": {"name": "reinforce++", "gamma": 0.0}, "normalize_advantages": "none"}
    credit = make_credit({**given, "distillation": {"coef": 0.25}}, teacher=teacher)
    assert credit.passes.teacher
    assert credit.passes.policy
    teacher_logprobs = -torch.rand(12, generator=torch.Generator().manual_seed(8))
    batch = make_batch(teacher_logprobs=teacher_logprobs, rollout_ids=torch.arange(6))
    gap = batch.vectors["teacher_logprobs"] - batch.vectors["logprobs"]
    without = make_credit(given)
    assert not without.passes.teacher
    difference = credit.advantages(batch).advantages - without.advantages(batch).advantages
    torch.testing.assert_close(difference, 0.25 * gap)


# --- weights --------------------------------------------------------------------------------------


def weights(batch: RolloutBatch, minibatches: Any = EVERYTHING, **algorithm: Any) -> Tensor:
    return make_credit(algorithm).assign(batch, minibatches)["weights"]


def test_samples_of_one_rollout_share_a_denominator() -> None:
    each = weights(make_batch(), loss={"aggregation": "seq-mean-token-mean"})
    shared = weights(make_batch(), loss={"aggregation": "seq-mean-token-mean", "per_rollout": True})
    # 3 rollouts of 4 tokens
    per_token = {0: 1 / (3 * 4), 1: 1 / (3 * 4), 3: 1 / (3 * 4), 4: 1 / (3 * 4), 5: 1 / (3 * 4)}
    assert torch.allclose(
        shared, torch.tensor([per_token[s] for s, n in enumerate(LENGTHS) for _ in range(n)])
    )
    assert torch.allclose(each[:4], torch.tensor([1 / 15, 1 / 15, 1 / 15, 1 / 5]))
    assert float(shared.sum()) == pytest.approx(1.0)


def test_rollouts_are_counted_in_the_optimizer_step_of_their_tokens() -> None:
    steps = [[0, 1, 2], [5, 3, 4]]
    got = weights(
        make_batch(), steps, loss={"aggregation": "seq-mean-token-sum", "per_rollout": True}
    ).split(LENGTHS)
    assert [float(part[0]) for part in got if len(part)] == [1.0, 1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_old_tokens_weigh_nothing_and_the_others_as_before(aggregation: Any, limit: int) -> None:
    batch = make_batch()
    whole = weights(batch, loss={"aggregation": aggregation})
    got = weights(batch, loss={"aggregation": aggregation}, correction={"max_staleness": limit})
    assert batch.versions is not None
    old = 5 - batch.versions.each() > limit
    assert bool(old.any()) is (limit < 2)
    assert torch.equal(got[~old], whole[~old]), "a dropped token still counts in the denominators"
    assert not got[old].any()
    assert torch.equal(whole, loss_weights(aggregation, batch.cu_seqlens))


def test_age_is_counted_from_the_policy_that_is_trained_not_from_the_newest_sample() -> None:
    batch = make_batch()
    batch.version = 6
    got = weights(batch, correction={"max_staleness": 1})
    assert batch.versions is not None
    assert torch.equal(got > 0, batch.versions.each() == 5)


def test_routing_replay_needs_the_pass_that_records() -> None:
    plain = {"estimator": {"name": "grpo"}}
    assert not make_credit(plain).passes.policy
    assert make_credit(plain, policy={"routing_replay": "logprobs"}).passes.policy


# --- what losses need of the whole optimizer step -------------------------------------------------


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_each_optimizer_step_has_statistics_of_its_own(name: str) -> None:
    steps = [[0, 3, 2], [5, 1, 4]]
    credit = make_credit({"loss": {"name": name}, "minibatches": 2})
    batch = make_batch()
    assert credit.passes.policy
    assigned = credit.assign(batch, steps)
    loss = build_policy_loss(name)
    for k, rows in enumerate(steps):
        part = batch.select(rows)
        mean = part.vectors["advantages"].double().mean()
        assert assigned[f"batch_stats/{k}/advantage_mean"] == pytest.approx(float(mean), abs=1e-6)
    names = {
        key.removeprefix("batch_stats/0/") for key in assigned if key.startswith("batch_stats/0/")
    }
    assert names == {
        key.removeprefix("batch_stats/1/") for key in assigned if key.startswith("batch_stats/1/")
    }
    assert loss.has_batch_stats


def test_a_loss_without_statistics_assigns_none() -> None:
    assert not [name for name in make_credit().assign(make_batch(), EVERYTHING) if "/" in name]


# --- the batch itself -----------------------------------------------------------------------------


def test_a_sequence_is_known_by_draw_and_index_wherever_it_stands(make_sample: Any) -> None:
    addresses = [(5, 1), (6, 0), (5, 0), (1 << 30, 3)]
    samples = [make_sample(draw, index=index) for draw, index in addresses]
    batch = RolloutBatch.from_samples(samples)
    ids = batch.vectors["sequence_ids"]
    assert ids.dtype == torch.int64
    assert len(set(ids.tolist())) == 4
    assert batch.select([3, 0]).vectors["sequence_ids"].tolist() == [
        samples[3].sequence_id,
        samples[0].sequence_id,
    ]
    again = RolloutBatch.from_samples([make_sample(5, index=0)])
    assert again.vectors["sequence_ids"][0] == ids[2], "whatever else is in the batch"


def test_parts_of_the_reward_are_columns_for_the_estimator_that_takes_them(
    make_sample: Any,
) -> None:
    parts = {"math": {"function": "math", "weight": 2.0}, "form": {"function": "f1"}}
    samples = [make_sample(draw, index=index) for draw in (1, 2) for index in (0, 1)]
    scored = [{"math": 1.0, "math.steps": 3.0, "form": 9.0}, {"math": 0.0}, {}, {"form": 1.0}]
    for sample, found in zip(samples, scored):
        sample.reward_parts = found
        sample.rollout_id = sample.sequence_id
    credit = make_credit({"estimator": {"name": "gdpo"}}, reward={"parts": parts})
    batch = RolloutBatch.from_samples(samples, reward_parts=credit.reward_parts)
    nan = float("nan")
    expected = torch.tensor([[1.0, 9.0], [0.0, nan], [nan, nan], [nan, 1.0]])
    torch.testing.assert_close(batch.vectors["reward_parts"], expected, equal_nan=True)
    torch.testing.assert_close(
        batch.select([3, 0]).vectors["reward_parts"], expected[[3, 0]], equal_nan=True
    )
    # the first group: math +-0.707 with weight 2, form of one; the second has nothing to compare
    sums = torch.tensor([2 * 0.5**0.5, -2 * 0.5**0.5, 0.0, 0.0])
    got = credit.advantages(batch).advantages[batch.cu_seqlens[:-1]]
    torch.testing.assert_close(got, sums / sums.std(), rtol=1e-5, atol=1e-6)

    assert make_credit(reward={"parts": parts}).reward_parts == []
    assert "reward_parts" not in RolloutBatch.from_samples(samples).vectors
    with pytest.raises(RunFailed, match=r"'gdpo' needs 'reward_parts'; .* is missing"):
        credit.advantages(RolloutBatch.from_samples(samples))
    with pytest.raises(ValueError, match=r"reward_parts has shape \(4,\), expected \(4, parts\)"):
        batch.set("reward_parts", torch.zeros(4))


def test_a_selection_keeps_the_version() -> None:
    assert make_batch().select([1]).version == 5
    versions = make_batch().select([0]).versions
    assert versions is not None
    assert np.all(versions.each().numpy() == [3, 4, 5])
