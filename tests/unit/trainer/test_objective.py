"""The objective: the policy loss with its correction, and the terms beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import (
    Correction,
    PolicyLoss,
    PolicyLossInputs,
    approx_kl,
    build_policy_loss,
    loss_kl,
)
from rlcore.algorithms.moments import REDUCTIONS
from rlcore.config.sections.algorithm import AlgorithmConfig
from rlcore.trainer.objective import Objective

CU = torch.tensor([0, 3, 3, 5, 9])


def make_inputs(**fields: Any) -> PolicyLossInputs:
    generator = torch.Generator().manual_seed(4)

    def normal(scale: float) -> Tensor:
        return torch.randn(9, generator=generator, dtype=torch.float64) * scale - 2.0

    given: dict[str, Any] = {
        "logprobs": normal(0.3).requires_grad_(),
        "old_logprobs": normal(0.3),
        "rollout_logprobs": normal(0.6),
        "ref_logprobs": normal(0.5),
        "advantages": normal(1.0) + 2.0,
        "entropy": (normal(0.1) + 4.0).requires_grad_(),
        "weights": torch.full((9,), 1 / 9, dtype=torch.float64),
    }
    return PolicyLossInputs(cu_seqlens=CU, **{**given, **fields})


def objective(**algorithm: Any) -> Objective:
    return Objective(AlgorithmConfig.model_validate(algorithm))


def terms(inputs: PolicyLossInputs) -> tuple[Tensor, Tensor]:
    """The policy loss and what stands beside it with the coefficients of `BESIDE`, both [M]."""
    policy = build_policy_loss("ppo_clip")(inputs).per_token
    assert inputs.ref_logprobs is not None
    assert inputs.entropy is not None
    return (
        policy,
        0.1 * approx_kl(inputs.logprobs, inputs.ref_logprobs, "k3") - 0.02 * inputs.entropy,
    )


BESIDE: dict[str, Any] = {"kl": {"loss_coef": 0.1, "loss_kind": "k3"}, "entropy_coef": 0.02}


def test_without_a_correction_the_terms_simply_add_up() -> None:
    inputs = make_inputs()
    policy, others = terms(inputs)
    assert torch.equal(objective()(inputs).per_token, policy)
    torch.testing.assert_close(objective(**BESIDE)(inputs).per_token, policy + others)


@pytest.mark.parametrize("name", ["tis", "mis", "icepop"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_correction_weighs_the_policy_loss_and_only_that(name: Any, level: Any) -> None:
    inputs = make_inputs()
    options = {"level": level, "lower": 0.7, "upper": 1.3}
    assert inputs.rollout_logprobs is not None
    found = Correction(name, **options)(inputs.old_logprobs, inputs.rollout_logprobs, CU)
    assert not torch.equal(found.weights, torch.ones(9)), "this case corrects something"
    policy, others = terms(inputs)
    out = objective(**BESIDE, correction={"name": name, **options})(inputs)
    torch.testing.assert_close(out.per_token, found.weights * policy + found.keep * others)
    assert inputs.weights is not None
    torch.testing.assert_close(
        out.metrics["policy_loss"], inputs.weights * found.weights * policy.detach()
    )
    assert found.metrics.keys() <= out.metrics.keys()


def test_a_token_that_is_not_kept_has_no_gradient_in_any_term() -> None:
    inputs = make_inputs()
    out = objective(**BESIDE, correction={"name": "mis", "lower": 0.8, "upper": 1.2})(inputs)
    out.per_token.sum().backward()
    dropped = out.metrics["correction_masked"].bool()
    assert 0 < int(dropped.sum()) < 9
    for leaf in (inputs.logprobs, inputs.entropy):
        assert leaf is not None
        assert leaf.grad is not None
        assert not leaf.grad[dropped].any()
        assert bool((leaf.grad[~dropped] != 0).all())


def test_icepop_keeps_the_other_terms_where_it_stops_the_policy() -> None:
    inputs = make_inputs()
    out = objective(**BESIDE, correction={"name": "icepop", "lower": 0.8, "upper": 1.2})(inputs)
    masked = out.metrics["correction_masked"].bool()
    assert bool(masked.any())
    torch.testing.assert_close(out.per_token[masked], terms(inputs)[1][masked])


def test_a_veto_drops_the_whole_sequence() -> None:
    rollout = make_inputs().old_logprobs.clone()
    rollout[4] += 12.0  # the trainer finds this token far less likely than the engine did
    out = objective(**BESIDE, correction={"name": "tis", "veto": 1e-4})(
        make_inputs(rollout_logprobs=rollout)
    )
    assert (out.per_token == 0).tolist() == [False] * 3 + [True] * 2 + [False] * 4


def test_where_engine_and_trainer_agree_nothing_changes() -> None:
    inputs = make_inputs()
    same = replace(inputs, rollout_logprobs=inputs.old_logprobs)
    for name in ("tis", "mis", "icepop"):
        assert torch.equal(
            objective(**BESIDE, correction={"name": name})(same).per_token,
            objective(**BESIDE)(same).per_token,
        )


def test_the_unbiased_kl_is_weighed_by_the_ratio_to_the_old_policy() -> None:
    inputs = make_inputs()
    assert inputs.ref_logprobs is not None
    for kind in ("k1", "k2", "k3"):
        kl: dict[str, Any] = {"loss_coef": 0.5, "loss_kind": kind}
        plain, unbiased = (
            objective(kl={**kl, "loss_unbiased": flag})(inputs).per_token for flag in (False, True)
        )
        policy = terms(inputs)[0]
        torch.testing.assert_close(
            plain - policy, 0.5 * approx_kl(inputs.logprobs, inputs.ref_logprobs, kind)
        )
        expected = 0.5 * loss_kl(
            inputs.logprobs, inputs.ref_logprobs, kind, old_logprobs=inputs.old_logprobs
        )
        torch.testing.assert_close(unbiased - policy, expected)
        assert not torch.allclose(plain, unbiased)


def test_every_metric_of_the_objective_is_one_that_is_published() -> None:
    out = objective(**BESIDE, correction={"name": "tis"})(make_inputs())
    assert out.metrics.keys() <= REDUCTIONS.keys()
    assert {"rollout/kl", "engine_gap", "engine_ratio", "correction_weight"} <= out.metrics.keys()
    assert not any(value.requires_grad for value in out.metrics.values())


class Silent:
    """A user's loss that reports nothing."""

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        return PolicyLoss(-inputs.advantages * inputs.logprobs, {})


class OwnKL:
    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        return PolicyLoss(-inputs.logprobs, {"approxkl": torch.full((9,), 7.0)})


def test_how_far_the_policy_moved_is_known_whatever_the_loss_reports() -> None:
    """`training.max_update_kl` compares it; without it the limit would end nothing."""
    inputs = make_inputs()
    own = objective(loss={"name": "reinforce"})(inputs).metrics["approxkl"]
    metrics = objective(loss={"name": f"{__name__}:Silent"})(inputs).metrics
    torch.testing.assert_close(metrics["approxkl"], own)
    assert metrics["approxkl"].max() > 0
    assert objective(loss={"name": f"{__name__}:OwnKL"})(inputs).metrics["approxkl"][0] == 7.0
    assert "approxkl" not in objective(loss={"name": "sft"})(inputs).metrics, "labels have none"
