from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from rlcore.algorithms import (
    METRICS,
    Correction,
    EstimatorInputs,
    InputError,
    Moments,
    PolicyLoss,
    PolicyLossInputs,
    approx_kl,
    build_estimator,
    build_policy_loss,
    conversation_metrics,
    explained_variance,
    kl_clamped,
    loss_weights,
    metric_spec,
    mismatch_vectors,
    rollout_metrics,
    value_clipped,
    value_loss,
)
from rlcore.algorithms.moments import STREAMED_METRICS
from rlcore.algorithms.rollout_metrics import BATCH_METRICS

from .helpers import cu

Make = Callable[..., EstimatorInputs]


def batch(**changes: torch.Tensor | None) -> EstimatorInputs:
    fields = {
        "rewards": torch.tensor([1.0, 0.0, 3.0, 3.0, 5.0]), "group_ids": torch.tensor([8, 8, 2, 2,
        7]),
        "kl": torch.tensor([0.1, 0.2, 0.3, 0.4, 1.0, 2.0]),
    }  # fmt: skip
    return EstimatorInputs(cu_seqlens=cu((3, 0, 1, 1, 1)), **{**fields, **changes})


def test_scores_by_hand() -> None:
    metrics = rollout_metrics(
        batch(), entropy=torch.arange(6.0), reward_coef=0.5, correct=torch.tensor([1, 0, 1, 1, 1])
    )
    # over the four sequences that have a token
    assert metrics["objective/kl"] == pytest.approx(4.0 / 4)
    assert metrics["rollout/kl"] == pytest.approx(4.0 / 6)
    assert metrics["objective/entropy"] == pytest.approx(15 / 4)
    assert metrics["objective/scores"] == pytest.approx(12 / 4)
    assert metrics["objective/non_score_reward"] == pytest.approx(-0.5)
    assert metrics["objective/rlhf_reward"] == pytest.approx(2.5)
    assert metrics["objective/verifiable_correct_rate"] == pytest.approx(0.8)
    assert metrics["rollout/reward"] == pytest.approx(12 / 5)


def test_groups_by_hand() -> None:
    metrics = rollout_metrics(batch())  # the second sequence is empty, so group 8 has one member
    assert metrics["rollout/singleton_groups"] == 2
    assert metrics["rollout/zero_std_groups"] == 1
    assert metrics["rollout/reward_std"] == pytest.approx(batch().rewards.std().item())


def test_responses_by_hand() -> None:
    reasons = ["stop", "abort", "length", "stop", "stop"]
    metrics = rollout_metrics(batch(), finish_reasons=reasons)
    assert metrics["val/sequence_lengths"] == pytest.approx(6 / 5)
    assert (metrics["val/sequence_lengths_min"], metrics["val/sequence_lengths_max"]) == (0, 3)
    assert metrics["val/num_stop_token_ids"] == 3
    assert metrics["val/stop_token_rate"] == pytest.approx(0.6)


def test_off_policy_by_hand() -> None:
    engine = torch.full((6,), -1.0)
    train = engine + torch.tensor([0.0, 0.5, -0.25, -0.25, 0.0, 0.0])
    reference = train - torch.tensor([0.0, 25.0, 0.0, -25.0, 0.0, 25.0])
    inputs = batch(
        logprobs=train,
        rollout_logprobs=engine,
        ref_logprobs=reference,
        versions=torch.tensor([4, 4, 5, 5, 5, 2]),
    )
    metrics = rollout_metrics(inputs, version=5)
    weights = (train - engine).double().exp()
    assert metrics["rollout/train_rollout_logprob_diff"] == pytest.approx(1 / 6)
    assert metrics["rollout/train_rollout_logprob_diff_max"] == pytest.approx(0.5)
    assert metrics["rollout/train_rollout_logprob_diff_kl"] == pytest.approx(
        ((weights - 1 - weights.log()).sum() / 6).item()
    )
    assert metrics["rollout/ess"] == pytest.approx(
        (weights.sum() ** 2 / (6 * (weights**2).sum())).item()
    )
    assert metrics["rollout/kl_clamped_share"] == pytest.approx(0.5)
    assert metrics["rollout/staleness_mean"] == pytest.approx(5 / 6)
    assert metrics["rollout/staleness_max"] == 3


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 6.0])
    assert explained_variance(returns, returns) == pytest.approx(1.0)
    assert explained_variance(torch.full((4,), 9.0), returns) == pytest.approx(0.0)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(4)) is None
    assert "val/explained_variance" in rollout_metrics(
        batch(values=torch.randn(6)), returns=torch.randn(6)
    )


def test_what_tells_of_a_gamed_reward_by_hand() -> None:
    """The mean of the four that have a token is 3, which the last three reach."""
    metrics = rollout_metrics(
        batch(),
        finish_reasons=["length", "abort", "length", "stop", "turns"],
        responses=["a", "", "b", "b", "c"],
        prompt_overlap=torch.tensor([1.0, 0.0, 0.5, 0.25, 0.0]),
    )
    assert metrics["rollout/rewarded_truncated"] == pytest.approx(2 / 3)
    assert metrics["rollout/rewarded_prompt_overlap"] == pytest.approx(0.25)
    assert metrics["rollout/commonest_response"] == pytest.approx(2 / 4)


@pytest.mark.parametrize("reward", [0.0, 0.1, 1.0])
def test_equal_rewards_are_all_rewarded(reward: float) -> None:
    inputs = batch(rewards=torch.full((5,), reward))
    ends = ["length", "abort", "length", "stop", "stop"]
    found = rollout_metrics(inputs, finish_reasons=ends)
    assert found["rollout/rewarded_truncated"] == pytest.approx(0.5)


def test_what_was_not_measured_is_absent() -> None:
    assert set(rollout_metrics(batch(kl=None))) == {
        "objective/scores", "val/sequence_lengths", "val/sequence_lengths_min",
        "val/sequence_lengths_max",
        "rollout/reward", "rollout/reward_std", "rollout/singleton_groups",
        "rollout/zero_std_groups",
    }  # fmt: skip
    assert "objective/rlhf_reward" not in rollout_metrics(batch(kl=None), reward_coef=0.1)
    assert rollout_metrics(batch(kl=None), reward_coef=0.0)["objective/rlhf_reward"] == 3.0


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_batches_without_tokens(make_inputs: Make, lengths: tuple[int, ...]) -> None:
    inputs = make_inputs(lengths=lengths)
    metrics = rollout_metrics(
        inputs,
        entropy=inputs.kl,
        finish_reasons=["abort"] * len(lengths),
        returns=inputs.kl,
        reward_coef=0.1,
        version=3,
    )
    assert not any(name.startswith("objective") for name in metrics)


def test_the_logged_kl_is_the_raw_kl(make_inputs: Make) -> None:
    inputs = make_inputs()
    before = rollout_metrics(inputs)
    build_estimator("ppo", kl_coef=0.5)(inputs)
    assert rollout_metrics(inputs) == before


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(InputError, match=r"entropy: expected shape \[M\] = \[6\], got \[5\]"):
        rollout_metrics(batch(), entropy=torch.zeros(5))
    with pytest.raises(InputError, match="finish_reasons: expected B = 5"):
        rollout_metrics(batch(), finish_reasons=["stop"])


def test_every_definition_is_computed_and_everything_computed_is_defined(make_inputs: Make) -> None:
    inputs = make_inputs()
    noise = inputs.kl
    assert noise is not None
    full = EstimatorInputs(**{
        **vars(inputs), "ref_logprobs": noise, "rollout_logprobs": noise, "versions": torch.zeros(
        176).long(),
        "baseline_rewards": inputs.rewards,
    })  # fmt: skip
    made = rollout_metrics(
        full, finish_reasons=["stop"] * 9, entropy=noise, correct=torch.ones(9), returns=noise,
        reward_coef=0.1, version=1, max_staleness=1, responses=["a"] * 9,
        prompt_overlap=torch.ones(9),
    )  # fmt: skip
    moments = train(full.cu_seqlens, [(0, 9)])
    assert {*made, *moments.reduce()} == {
        spec.name for spec in (*BATCH_METRICS, *STREAMED_METRICS) if "<" not in spec.name
    }


def test_every_metric_is_defined_once_and_whole() -> None:
    defined = [spec.name for spec in (*BATCH_METRICS, *STREAMED_METRICS)]
    assert len(defined) == len(set(defined))
    assert set(defined) < set(METRICS)
    for name, spec in METRICS.items():
        assert name == spec.name
        assert spec.definition
        assert spec.denominator
        assert spec.unit
        # it would end a cell of the page
        assert "|" not in spec.name + spec.definition + spec.denominator + spec.unit


def test_a_family_of_names_has_one_definition() -> None:
    assert metric_spec("rollout/kl") is METRICS["rollout/kl"]
    assert metric_spec("rollout/dropped_zero_variance") is METRICS["rollout/dropped_<filter>"]
    assert metric_spec("policy/mine_avg") is METRICS["policy/<name>_avg"]
    assert metric_spec("rollout/dropped_") is None
    assert metric_spec("rollout/kk") is None


def train(borders: torch.Tensor, micro_batches: list[tuple[int, int]]) -> Moments:
    """Feed what an update feeds, from these ranges of sequences."""
    generator = torch.Generator().manual_seed(5)
    vectors = torch.randn(8, int(borders[-1]), generator=generator, dtype=torch.float64)
    weights = loss_weights("seq-mean-token-mean", borders)
    loss = build_policy_loss("ppo_clip", dual_clip=3.0)
    moments = Moments()
    correction = Correction("tis", level="sequence", veto=0.05)
    for first, last in micro_batches:
        tokens = slice(int(borders[first]), int(borders[last]))
        logprobs, old, advantages, entropy, values, returns, engine, reference = vectors[:, tokens]
        inputs = PolicyLossInputs(
            cu_seqlens=borders[first : last + 1] - borders[first], logprobs=logprobs, old_logprobs=
            old,
            advantages=advantages, entropy=entropy.abs(),
        )  # fmt: skip
        plain = loss(inputs)
        corrected = correction(old, engine, inputs.cu_seqlens)
        found = {
            **plain.metrics, **corrected.metrics, **mismatch_vectors(logprobs, engine),
            "rollout/kl": approx_kl(logprobs, reference, "k1"),
            "rollout/kl_clamped_share": kl_clamped(logprobs, reference),
            "policy_loss": weights[tokens] * corrected.weights * plain.per_token,
        }  # fmt: skip
        moments.add_objective(
            PolicyLoss(corrected.weights * plain.per_token, found), weights[tokens]
        )
        moments.add("step_kl", approx_kl(logprobs, old, "k2"))
        clipped = value_clipped(values, old, returns, clip=0.2)
        moments.add_value_loss(value_loss(values, old, returns, clip=0.2), weights[tokens], clipped)
        moments.add("mtp_loss", values)
    return moments


@pytest.mark.parametrize(
    "split", [[(0, 3), (3, 9)], [(i, i + 1) for i in range(9)], [(0, 0), (0, 9)]]
)
def test_moments_do_not_depend_on_the_split(
    make_inputs: Make, split: list[tuple[int, int]]
) -> None:
    borders = make_inputs().cu_seqlens
    whole = train(borders, [(0, 9)])
    for metric, value in train(borders, split).reduce().items():
        assert value == pytest.approx(whole.reduce()[metric], rel=1e-12), metric


def test_moments_of_ranks_add_up(make_inputs: Make) -> None:
    borders = make_inputs().cu_seqlens
    # the last has no token
    ranks = [train(borders, [(0, 2)]), train(borders, [(2, 9)]), train(borders, [(1, 2)])]
    names = ranks[0].names
    assert all(rank.names == names for rank in ranks)
    packed = [rank.pack(names) for rank in ranks]
    sums = sum(p[0] for p in packed)
    maxima = torch.stack([p[1] for p in packed]).amax(0)
    assert isinstance(sums, torch.Tensor)
    reduced = Moments.unpack(names, sums, maxima).reduce()
    merged = ranks[1]
    merged.merge(ranks[0])
    assert reduced == pytest.approx(train(borders, [(0, 9)]).reduce())
    assert merged.reduce() == pytest.approx(reduced)


def test_moments_by_hand() -> None:
    moments = Moments()
    moments.add("ratio", torch.tensor([1.0, 2.0]))
    moments.update(
        {
            "ratio": torch.tensor([6.0]),
            "entropy": torch.zeros(0),
            "mine/x": torch.ones(2),
            "y": torch.ones(2),
        }
    )
    moments.add("policy_loss", torch.tensor([3.0, 1.0]))
    assert moments.reduce(optimizer_steps=2) == {
        "val/ratio": 3.0, "val/ratio_max": 6.0, "val/ratio_var": 7.0, "mine/x": 1.0, "policy/y_avg":
        1.0,
        "loss/policy_avg": 2.0,
    }  # fmt: skip
    assert Moments().reduce() == {}


def test_the_ratio_variance_is_exact_close_to_one() -> None:
    ratio = 1 + 1e-6 * torch.randn(
        10_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    moments = Moments()
    for part in ratio.split(1000):
        moments.add("ratio", part)
    assert moments.reduce()["val/ratio_var"] == pytest.approx(ratio.var().item(), rel=1e-3)


def test_the_import_is_light() -> None:
    code = (
        "import json, sys, rlcore.algorithms; print(json.dumps(sorted(m.split('.')[0] for m in"
        " sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    loaded = set(json.loads(out.stdout.splitlines()[-1]))
    assert not loaded & {
        "megatron",
        "transformers",
        "pydantic",
        "sglang",
        "ray",
        "backends",
        "rollout",
        "scipy",
    }


# --- conversations --------------------------------------------------------------------------------


ROWS = [
    {"turns": 2.0, "generated_tokens": 30.0, "trained_tokens": 30.0, "cached_tokens": 8.0},
    {},  # another segment of the same rollout
    {
        "turns": 4.0,
        "generated_tokens": 50.0,
        "trained_tokens": 30.0,
        "untrained_lost": 20.0,
        "doors": 3.0,
    },
]


def test_means_are_over_rollouts_that_measured() -> None:
    found = conversation_metrics(ROWS)
    assert found == {
        "conversation/turns": 3.0,
        "conversation/generated_tokens": 40.0,
        "conversation/trained_tokens": 30.0,
        "conversation/untrained_lost": 10.0,  # 0 where nothing was lost
        "conversation/merge_ratio": 0.75,
        "conversation/cached_tokens": 8.0,  # one engine did not tell
        "conversation/doors": 3.0,
    }
    assert [name for name in found if metric_spec(name) is None] == []
    spec = metric_spec("conversation/untrained_lost")
    assert spec is not None
    assert spec.unit == "tokens"


def test_a_measurement_of_a_workflow_alone_counts_no_token() -> None:
    rows = [{"generated_tokens": 10.0, "trained_tokens": 5.0}, {"doors": 1.0}]
    assert conversation_metrics(rows)["conversation/merge_ratio"] == 0.5


def test_without_conversations_there_are_none() -> None:
    assert conversation_metrics([{}, {}]) == {}
