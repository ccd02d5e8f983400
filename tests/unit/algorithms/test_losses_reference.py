"""Every policy loss against its slow reference: values, whole Jacobians, extremes, identities."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcore.algorithms import (
    PolicyLoss,
    PolicyLossInputs,
    build_policy_loss,
    policy_loss_names,
    policy_loss_plugin,
)

from .helpers import cu
from .reference_losses import REFERENCES, Rows, Sequence

RAGGED = (5, 0, 1, 9, 0, 3, 1, 12)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("cispo", {}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.28}),
    ("clip_cov", {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0}),
    ("decoupled_ppo", {"dual_clip": 1.5}),
    ("decoupled_ppo", {"behavior_cap": 1.1}),
    ("decoupled_ppo", {"behavior_cap": 1.1, "cap_mode": "mask", "clip_high": 0.28}),
    ("geo_mean", {}),
    ("geo_mean", {"clip_low": 0.1, "clip_high": 0.2}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("gspo_token", {"clip_low": 0.1, "clip_high": 0.2}),
    ("kl_cov", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}),
    ("ppo_clip", {}),
    ("ppo_clip", {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 1.5}),
    ("reinforce", {}),
    ("sapo", {}),
    ("sapo", {"tau_pos": 0.5, "tau_neg": 3.0}),
    ("sft", {}),
]
# by comparing covariances, of which equal ones may differ in their last bit
CHOOSES = {"clip_cov", "kl_cov"}


def each_case(*, but: Collection[str] = ()) -> pytest.MarkDecorator:
    cases = [(name, kwargs) for name, kwargs in CASES if name not in but]
    ids = [f"{name}-{'-'.join(map(str, kwargs.values())) or 'default'}" for name, kwargs in cases]
    return pytest.mark.parametrize(("name", "kwargs"), cases, ids=ids)


def ragged_step(
    lengths: tuple[int, ...] = RAGGED, spread: float = 0.3, seed: int = 0
) -> list[Sequence]:
    """Random tokens, each number one that float32 holds; an advantage in eight is 0."""
    generator = torch.Generator().manual_seed(seed)

    def noise(n: int) -> Tensor:
        return torch.randn(n, generator=generator)

    step = []
    for b, n in enumerate(lengths):
        old = -noise(n).abs() - 0.1
        advantages = noise(n) * (torch.rand(n, generator=generator) > 0.125)
        logprobs = old + spread * noise(n)
        rollout = old + spread * noise(n)
        step.append(
            Sequence(
                1000 - 7 * b, *(x.double().tolist() for x in (logprobs, old, rollout, advantages))
            )
        )
    return step


def inputs_of(
    step: list[Sequence], dtype: torch.dtype = torch.float64, **changes: Tensor
) -> PolicyLossInputs:
    def flat(field: str) -> Tensor:
        return torch.tensor([x for sequence in step for x in getattr(sequence, field)], dtype=dtype)

    fields = {
        "logprobs": flat("logprobs"), "old_logprobs": flat("old"), "rollout_logprobs": flat(
        "rollout"),
        "advantages": flat("advantages"), "sequence_ids": torch.tensor([s.identity for s in step],
        dtype=torch.int64),
    }  # fmt: skip
    return PolicyLossInputs(cu_seqlens=cu([len(s.old) for s in step]), **{**fields, **changes})


built = cache(build_policy_loss)


def evaluate(name: str, kwargs: dict[str, Any], inputs: PolicyLossInputs) -> PolicyLoss:
    """The loss, with its own statistics of these inputs as the whole step."""
    loss = built(name, **kwargs)
    return loss(replace(inputs, batch_stats=loss.batch_stats(inputs)))


def values_and_jacobian(
    name: str, kwargs: dict[str, Any], inputs: PolicyLossInputs
) -> tuple[Tensor, Tensor]:
    logprobs = inputs.logprobs.detach().requires_grad_()
    per_token = evaluate(name, kwargs, replace(inputs, logprobs=logprobs)).per_token
    rows = [torch.autograd.grad(x, logprobs, retain_graph=True)[0] for x in per_token]
    return per_token.detach(), torch.stack(rows) if rows else logprobs.new_zeros(0, 0).detach()


def expected(rows: Rows) -> tuple[Tensor, Tensor]:
    values = torch.tensor([loss for losses, _ in rows for loss in losses], dtype=torch.float64)
    blocks = [torch.tensor(slopes, dtype=torch.float64) for losses, slopes in rows if losses]
    return values, torch.block_diag(*blocks) if blocks else torch.zeros(0, 0, dtype=torch.float64)


def test_every_loss_of_ours_has_a_reference_a_formula_and_a_source() -> None:
    ours = {
        n
        for n in policy_loss_names()
        if policy_loss_plugin(n).factory.__module__.startswith("rlcore.")
    }
    assert ours == set(REFERENCES) == {name for name, _ in CASES}
    for name in ours:
        plugin = policy_loss_plugin(name)
        assert plugin.formula, name
        assert plugin.source, name


@each_case()
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_values_and_gradients(name: str, kwargs: dict[str, Any], seed: int) -> None:
    """The Jacobian is that of the reference and 0 between sequences, short ones included."""
    step = ragged_step(seed=seed)
    values, jacobian = values_and_jacobian(name, kwargs, inputs_of(step))
    want_values, want_jacobian = expected(REFERENCES[name](step, **kwargs))
    torch.testing.assert_close(values, want_values, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(jacobian, want_jacobian, rtol=1e-11, atol=1e-13)


finite = st.floats(-1e4, 1e4, width=32)
token = st.tuples(finite, st.floats(-30, 0, width=32), finite, st.floats(-8, 8, width=32))
tokens = st.lists(st.lists(token, max_size=4), max_size=4)


@each_case(but=CHOOSES)
@settings(max_examples=25, deadline=None)
@given(drawn=tokens)
def test_any_finite_input(
    name: str, kwargs: dict[str, Any], drawn: list[list[tuple[float, ...]]]
) -> None:
    step = [
        Sequence(b, *([row[i] for row in rows] for i in range(4))) for b, rows in enumerate(drawn)
    ]
    values, jacobian = values_and_jacobian(name, kwargs, inputs_of(step))
    want_values, want_jacobian = expected(REFERENCES[name](step, **kwargs))
    torch.testing.assert_close(values, want_values, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(jacobian, want_jacobian, rtol=1e-9, atol=1e-12)


@each_case()
def test_extreme_log_ratios_in_float32(name: str, kwargs: dict[str, Any]) -> None:
    """Loss and gradient stay finite and right, also where the engine is far from the trainer."""
    far = [(1e4,), (-1e4,), (1e4, 0.0), (-1e4, 0.5, -0.5), (1e4, -1e4, 0.25), (21.0, 19.0)]
    for gaps, advantage in itertools.product(far, [1.0, -1.0, 0.0]):
        n = len(gaps)
        step = [Sequence(3, [gap - 1.0 for gap in gaps], [-1.0] * n, [-1e4] * n, [advantage] * n)]
        values, jacobian = values_and_jacobian(name, kwargs, inputs_of(step, torch.float32))
        want_values, want_jacobian = expected(REFERENCES[name](step, **kwargs))
        assert want_values.isfinite().all(), (gaps, advantage)
        torch.testing.assert_close(values.double(), want_values, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(jacobian.double(), want_jacobian, rtol=1e-4, atol=1e-6)


@each_case()
@pytest.mark.parametrize("gap", [float("inf"), float("-inf")])
def test_an_infinite_log_ratio_has_no_infinite_gradient(
    name: str, kwargs: dict[str, Any], gap: float
) -> None:
    step = [Sequence(3, [gap, -1.0], [-1.0, -1.0], [-1.0, -1.0], [1.0, -1.0])]
    _, jacobian = values_and_jacobian(name, kwargs, inputs_of(step))
    assert jacobian.isfinite().all()


@pytest.mark.parametrize("name", sorted(set(REFERENCES) - {"sft"}))
def test_ratio_and_approxkl_mean_the_same_for_every_loss(name: str) -> None:
    step = ragged_step()
    inputs = inputs_of(step)
    metrics = evaluate(name, {}, inputs).metrics
    d = inputs.logprobs - inputs.old_logprobs
    torch.testing.assert_close(metrics["ratio"], d.exp())
    torch.testing.assert_close(metrics["approxkl"], 0.5 * d.square())
    for value in metrics.values():
        assert value.shape == (sum(RAGGED),)
        assert not value.requires_grad
    if "clipfrac" in metrics:
        torch.testing.assert_close(
            metrics["clipfrac"], metrics["clipfrac_high"] + metrics["clipfrac_low"]
        )


@pytest.mark.parametrize("name", sorted(set(REFERENCES) - {"sft", "gspo", "geo_mean"}))
def test_on_policy_each_token_has_the_policy_gradient(name: str) -> None:
    step = ragged_step(spread=0.0)
    inputs = inputs_of(step)
    _, jacobian = values_and_jacobian(name, {}, inputs)
    wanted = -inputs.advantages
    if name == "clip_cov":
        wanted = wanted * (1 - evaluate(name, {}, inputs).metrics["cov_clipfrac"])
    torch.testing.assert_close(jacobian, torch.diag(wanted))


@pytest.mark.parametrize("name", ["gspo", "geo_mean"])
def test_on_policy_a_sequence_has_the_mean_of_its_policy_gradient(name: str) -> None:
    step = ragged_step((4,), spread=0.0, seed=3)
    assert all(step[0].advantages), "every token has a sign"
    _, jacobian = values_and_jacobian(name, {}, inputs_of(step))
    wanted = -torch.tensor(step[0].advantages, dtype=torch.float64)
    torch.testing.assert_close(jacobian, (wanted / 4)[:, None].expand(4, 4))


def test_gspo_and_its_token_variant() -> None:
    """Equal in value; equal in gradient, summed over a sequence, where its advantages are equal."""
    step = ragged_step()
    level = torch.tensor(
        [b % 3 - 1.0 for b, n in enumerate(RAGGED) for _ in range(n)], dtype=torch.float64
    )
    clip = {"clip_low": 0.1, "clip_high": 0.2}
    for changes, equal in (({}, False), ({"advantages": level}, True)):
        whole, token_wise = (
            values_and_jacobian(name, clip, inputs_of(step, **changes))
            for name in ("gspo", "gspo_token")
        )
        torch.testing.assert_close(whole[0], token_wise[0])
        assert torch.allclose(whole[1].sum(0), token_wise[1].sum(0)) is equal


def test_decoupled_ppo_around_the_behaviour_policy_is_ppo() -> None:
    inputs = inputs_of(ragged_step())
    same = inputs_of(ragged_step(), rollout_logprobs=inputs.old_logprobs)
    torch.testing.assert_close(
        values_and_jacobian("decoupled_ppo", {}, same), values_and_jacobian("ppo_clip", {}, inputs)
    )


def test_decoupled_ppo_is_unbiased_for_the_proximal_surrogate() -> None:
    """Weighed by the behaviour policy's probabilities, the loss is that of proximal samples."""
    generator = torch.Generator().manual_seed(1)
    new, old, behaviour = torch.randn(3, 6, generator=generator, dtype=torch.float64).log_softmax(
        -1
    )
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    fields = {
        "cu_seqlens": cu((6,)),
        "logprobs": new,
        "old_logprobs": old,
        "advantages": advantages,
    }
    decoupled = build_policy_loss("decoupled_ppo")(
        PolicyLossInputs(**fields, rollout_logprobs=behaviour)
    ).per_token
    proximal = build_policy_loss("ppo_clip")(PolicyLossInputs(**fields)).per_token
    torch.testing.assert_close((behaviour.exp() * decoupled).sum(), (old.exp() * proximal).sum())


def test_decoupled_ppo_reports_its_weights() -> None:
    step = [Sequence(0, [-1.0] * 3, [-1.0] * 3, [-1.0, -3.0, 0.0], [1.0] * 3)]
    metrics = evaluate("decoupled_ppo", {"behavior_cap": 2.0}, inputs_of(step)).metrics
    assert metrics["behavior_weight"].tolist() == pytest.approx([1.0, 2.0, 0.36787944117144233])
    assert metrics["behavior_capped"].tolist() == [0, 1, 0]
    masked = evaluate("decoupled_ppo", {"behavior_cap": 2.0, "cap_mode": "mask"}, inputs_of(step))
    assert masked.per_token[1].item() == 0
    assert "behavior_capped" not in evaluate("decoupled_ppo", {}, inputs_of(step)).metrics


def test_cispo_keeps_the_gradient_that_ppo_clips_away() -> None:
    step = [Sequence(0, [2.0, -3.0], [0.0, 0.0], [0.0, 0.0], [1.0, -1.0])]
    assert values_and_jacobian("ppo_clip", {}, inputs_of(step))[1].diag().tolist() == [0, 0]
    out = evaluate("cispo", {"clip_low": 0.2, "clip_high": 0.2}, inputs_of(step))
    _, jacobian = values_and_jacobian("cispo", {"clip_low": 0.2, "clip_high": 0.2}, inputs_of(step))
    assert jacobian.diag().tolist() == pytest.approx([-1.2, 0.8])
    assert out.metrics["clipfrac_high"].tolist() == [1, 0]
    assert out.metrics["clipfrac_low"].tolist() == [0, 1]


def test_sapo_slope_peaks_at_one_and_fades_faster_below_zero_advantage() -> None:
    """The slope over that of the plain surrogate is 1 at r = 1 and less on both sides."""
    for advantage, tau in ((1.0, 1.0), (-1.0, 1.05)):
        shares = []
        for d in (-0.5, 0.0, 0.5):
            step = [Sequence(0, [d], [0.0], [0.0], [advantage])]
            slope = values_and_jacobian("sapo", {}, inputs_of(step))[1].item()
            shares.append(slope / (-advantage * torch.tensor(d, dtype=torch.float64).exp().item()))
        half = 0.5 * tau * (torch.tensor([-0.5, 0.0, 0.5], dtype=torch.float64).exp() - 1)
        assert shares == pytest.approx((1 / half.cosh().square()).tolist())
        assert max(shares) == shares[1] == pytest.approx(1.0)


def test_geo_mean_is_the_geometric_mean_of_the_clipped_ratios() -> None:
    step = [Sequence(0, [0.1, 0.9, -0.7], [0.0] * 3, [0.0] * 3, [2.0] * 3)]
    out = evaluate("geo_mean", {}, inputs_of(step))
    # 0.9 is held at 0.4; falling is free
    ratios = torch.tensor([0.1, 0.4, -0.7], dtype=torch.float64).exp()
    torch.testing.assert_close(out.per_token, -2.0 * ratios.prod().pow(1 / 3).expand(3))
    assert out.metrics["clipfrac_high"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("ppo_clip", {"clip_low": -0.1}, "clip_low"),
        ("ppo_clip", {"clip_low": 1.1}, "clip_low"),
        ("ppo_clip", {"clip_high": -1}, "clip_high"),
        ("ppo_clip", {"dual_clip": 1.0}, "dual_clip"),
        ("gspo", {"clip_low": -0.1}, "clip_low"),
        ("gspo_token", {"clip_high": -0.1}, "clip_high"),
        ("cispo", {"clip_low": 1.5}, "clip_low"),
        ("sapo", {"tau_pos": 0.0}, "tau_pos"),
        ("sapo", {"tau_neg": float("inf")}, "tau_neg"),
        ("geo_mean", {"clip_low": -0.1}, "clip_low: expected a log-ratio >= 0"),
        ("decoupled_ppo", {"behavior_cap": 0.0}, "behavior_cap"),
        ("decoupled_ppo", {"cap_mode": "drop"}, "cap_mode"),
        ("decoupled_ppo", {"dual_clip": 1.0}, "dual_clip"),
        ("clip_cov", {"clip_cov_ratio": 0.0}, "clip_cov_ratio"),
        ("clip_cov", {"clip_cov_lb": 5.0}, "clip_cov_lb"),
        ("kl_cov", {"kl_cov_ratio": 1.5}, "kl_cov_ratio"),
        ("kl_cov", {"ppo_kl_coef": -1.0}, "ppo_kl_coef"),
    ],
)
def test_senseless_keywords_are_refused(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_policy_loss(name, **kwargs)


def test_long_sequences_do_not_lose_their_mean_in_float32() -> None:
    """100,000 log-ratios of 1e-4 between log-probs of -12: s is e^1e-4, up to input rounding."""
    n = 100_000
    old = torch.full((n,), -12.0)
    logprobs = old + 1e-4
    inputs = PolicyLossInputs(
        cu_seqlens=cu((n,)), logprobs=logprobs, old_logprobs=old, advantages=torch.ones(n)
    )
    true = (logprobs.double() - old.double()).mean().exp()
    for name in ("gspo", "gspo_token", "geo_mean"):
        ratio = build_policy_loss(name)(inputs).metrics["sequence_ratio"]
        torch.testing.assert_close(ratio.double(), true.expand(n), rtol=2e-7, atol=0)
