"""`clip_cov` and `kl_cov` choose the same tokens in every split and order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import MissingInputError, PolicyLossInputs, build_policy_loss

from .helpers import cu

CHOSEN = {"clip_cov": "cov_clipfrac", "kl_cov": "cov_klfrac"}
WIDE: dict[str, dict[str, Any]] = {
    "clip_cov": {"clip_cov_ratio": 0.25, "clip_cov_lb": 0.0, "clip_cov_ub": 100.0},
    "kl_cov": {"kl_cov_ratio": 0.25},
}
each_loss = pytest.mark.parametrize("name", sorted(CHOSEN))


def step(
    old: list[float] | Tensor, advantages: list[float] | Tensor, lengths: tuple[int, ...] | None =
    None,
    dtype: torch.dtype = torch.float64, **changes: Any,
) -> PolicyLossInputs:  # fmt: skip
    old = torch.as_tensor(old, dtype=dtype)
    borders = cu(lengths if lengths is not None else (old.numel(),))
    fields: dict[str, Any] = {
        "logprobs": old, "old_logprobs": old, "advantages": torch.as_tensor(advantages, dtype=
        dtype),
        "sequence_ids": torch.arange(borders.numel() - 1),
    }  # fmt: skip
    return PolicyLossInputs(cu_seqlens=borders, **{**fields, **changes})


def chosen(name: str, inputs: PolicyLossInputs, **kwargs: Any) -> Tensor:
    loss = build_policy_loss(name, **{**WIDE[name], **kwargs})
    stats = inputs.batch_stats or loss.batch_stats(inputs)
    return loss(replace(inputs, batch_stats=stats)).metrics[CHOSEN[name]].bool()


def covariance(inputs: PolicyLossInputs) -> Tensor:
    advantages = inputs.advantages - inputs.advantages.mean()
    return advantages * (inputs.old_logprobs - inputs.old_logprobs.mean())


def random_step(n: int = 400, lengths: tuple[int, ...] = (150, 0, 1, 249)) -> PolicyLossInputs:
    generator = torch.Generator().manual_seed(0)
    old, advantages = torch.randn(2, n, generator=generator).double()
    return step(-old.abs(), advantages, lengths)


@each_loss
@pytest.mark.parametrize(("ratio", "count"), [(0.001, 1), (0.01, 4), (0.0149, 5), (0.1, 40)])
def test_as_many_as_asked_and_one_at_least(name: str, ratio: float, count: int) -> None:
    keyword = "clip_cov_ratio" if name == "clip_cov" else "kl_cov_ratio"
    assert chosen(name, random_step(), **{keyword: ratio}).sum() == count


def test_kl_cov_takes_the_highest() -> None:
    inputs = random_step()
    picked = chosen("kl_cov", inputs, kl_cov_ratio=0.1)
    highest = covariance(inputs).topk(40).indices
    assert set(picked.nonzero().flatten().tolist()) == set(highest.tolist())


def test_clip_cov_takes_a_random_part_of_those_between_the_bounds() -> None:
    inputs = random_step()
    cov = covariance(inputs)
    eligible = (cov > 0.2) & (cov < 0.8)
    bounds = {"clip_cov_lb": 0.2, "clip_cov_ub": 0.8}
    picked = chosen("clip_cov", inputs, **bounds, clip_cov_ratio=0.05)
    assert picked.sum() == 20 < eligible.sum()
    assert not (picked & ~eligible).any()
    first = torch.arange(20)
    assert not torch.equal(picked[eligible].nonzero().flatten(), first), "not simply the first"
    others = replace(inputs, sequence_ids=torch.arange(4) + 99)
    redrawn = chosen("clip_cov", others, **bounds, clip_cov_ratio=0.05)
    assert not torch.equal(picked, redrawn), "other sequences, other draws"
    assert torch.equal(chosen("clip_cov", inputs, **bounds, clip_cov_ratio=1.0), eligible)


@each_loss
def test_the_covariance_averages_to_the_covariance(name: str) -> None:
    inputs = random_step()
    loss = build_policy_loss(name)
    metrics = loss(replace(inputs, batch_stats=loss.batch_stats(inputs))).metrics
    both = torch.stack([inputs.advantages, inputs.old_logprobs])
    torch.testing.assert_close(metrics["covariance"].mean(), torch.cov(both, correction=0)[0, 1])


@each_loss
@pytest.mark.parametrize(
    ("old", "advantages"),
    [
        ([], []),
        ([-1.0], [2.0]),  # one token is its own mean
        ([-0.1, -0.2, -0.7, -1.3], [0.1] * 4),  # all advantages equal
        ([-0.3] * 4, [1.0, -1.0, 2.0, 0.5]),  # all log-probs equal
        ([-0.1, -2.0], [-1.0, 1.0]),  # every covariance is negative
    ],
)
def test_nothing_to_choose(name: str, old: list[float], advantages: list[float]) -> None:
    inputs = step(old, advantages)
    stats = build_policy_loss(name, **WIDE[name]).batch_stats(inputs)
    assert not chosen(name, inputs).any()
    assert all(value.shape == () and not value.isnan() for value in stats.values())


@pytest.mark.parametrize("value", [0.1, -1 / 3, 1e4 + 0.1, 1e-20])
def test_equal_numbers_have_exactly_no_covariance(value: float) -> None:
    """A mean that is off by a bit would leave noise to be ranked; 49 times 1/49 is not 1."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(49, generator=generator)
    for inputs in (step(old, torch.full((49,), value)), step(torch.full((49,), value), old)):
        assert not chosen("kl_cov", inputs, kl_cov_ratio=1.0).any()


def test_ties_are_broken_by_the_hash_not_by_position() -> None:
    """Of 20 tokens that share the highest covariance 10 are taken."""
    high = torch.arange(100) % 5 == 0
    old = torch.where(high, -0.1, -2.1)
    advantages = torch.where(high, 1.5, -1.0)
    inputs = step(old, advantages, (60, 40))
    picked = chosen("kl_cov", inputs, kl_cov_ratio=0.1)
    assert picked.sum() == 10
    assert not (picked & ~high).any()
    assert not torch.equal(picked.nonzero().flatten(), high.nonzero().flatten()[:10])
    swapped = step(old.roll(40), advantages.roll(40), (40, 60), sequence_ids=torch.tensor([1, 0]))
    assert torch.equal(chosen("kl_cov", swapped, kl_cov_ratio=0.1).roll(-40), picked)


@each_loss
def test_the_choice_outlives_updates_of_the_policy(name: str) -> None:
    """It hangs on the old log-probs: a second epoch over the batch penalises the same tokens."""
    inputs = random_step()
    stats = build_policy_loss(name, **WIDE[name]).batch_stats(inputs)
    moved = replace(inputs, logprobs=inputs.logprobs - 1.0, batch_stats=stats)
    assert torch.equal(chosen(name, moved), chosen(name, inputs))


@each_loss
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_that_holds_float32_chooses_what_the_whole_step_in_float64_did(
    name: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, advantages = torch.randn(2, 600, generator=generator, dtype=torch.float64)
    wide = step(old, advantages)
    stats = build_policy_loss(name, **WIDE[name]).batch_stats(wide)
    narrow = step(old, advantages, dtype=torch.float32, batch_stats=stats)
    assert chosen(name, wide).sum() > 100
    assert torch.equal(chosen(name, narrow), chosen(name, wide))


def test_what_is_done_to_the_chosen() -> None:
    inputs = random_step()
    logprobs = (inputs.old_logprobs + 0.1).requires_grad_()
    ratio = torch.tensor(0.1, dtype=torch.float64).exp()
    for name, kwargs, expected in (
        ("clip_cov", WIDE["clip_cov"], lambda a: 0 * a),
        ("kl_cov", {**WIDE["kl_cov"], "ppo_kl_coef": 3.0}, lambda a: -a * ratio + 3.0),
    ):
        loss = build_policy_loss(name, **kwargs)
        out = loss(replace(inputs, logprobs=logprobs, batch_stats=loss.batch_stats(inputs)))
        picked = out.metrics[CHOSEN[name]].bool()
        (gradient,) = torch.autograd.grad(out.per_token.sum(), logprobs)
        torch.testing.assert_close(gradient[picked], expected(inputs.advantages[picked]))
        torch.testing.assert_close(gradient[~picked], -inputs.advantages[~picked] * ratio)


@each_loss
def test_what_they_need_is_named(name: str) -> None:
    loss = build_policy_loss(name)
    assert loss.has_batch_stats
    assert loss.needs == {"sequence_ids"}
    inputs = random_step()
    with pytest.raises(MissingInputError, match=f"{name}.*batch_stats"):
        loss(inputs)
    with pytest.raises(MissingInputError, match="sequence_ids"):
        loss.batch_stats(replace(inputs, sequence_ids=None))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: the choice was not compared between devices",
)
@each_loss
def test_a_gpu_chooses_what_rank_0_settled_on_its_cpu(name: str) -> None:
    inputs = random_step()
    stats = build_policy_loss(name, **WIDE[name]).batch_stats(inputs)
    moved = {f: x.cuda() for f, x in vars(inputs).items() if isinstance(x, Tensor)}
    on_gpu = PolicyLossInputs(**moved, batch_stats={key: x.cuda() for key, x in stats.items()})
    assert torch.equal(chosen(name, on_gpu).cpu(), chosen(name, inputs))
