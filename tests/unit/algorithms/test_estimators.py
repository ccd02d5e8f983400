"""What an estimator declares, needs and refuses."""

from __future__ import annotations

import re

import pytest
import torch

from rlcore.algorithms import (
    EstimatorInputs,
    MissingInputError,
    OutputError,
    build_estimator,
    estimator_keywords,
    estimator_names,
    estimator_plugin,
)

from .helpers import cu, random_inputs

# with per-token rewards
SHAPED = ("ppo", "vapo", "reinforce++", "reinforce++_baseline", "remax", "rloo")
ALWAYS = {
    "ppo": {"values"},
    "vapo": {"values"},
    "remax": {"baseline_rewards"},
    "gdpo": {"reward_parts"},
    **{name: {"logprobs", "ref_logprobs"} for name in ("dpo", "ipo", "kto")},
    **{name: {"logprobs"} for name in ("simpo", "orpo")},
}


@pytest.mark.parametrize("name", estimator_names())
def test_each_says_its_formula_and_source(name: str) -> None:
    plugin = estimator_plugin(name)
    assert plugin.formula
    assert "\n" not in plugin.formula
    papers = re.findall(r"arXiv:\d{4}\.\d{5}", plugin.source)
    assert papers
    assert all(paper in str(plugin.factory.__doc__) for paper in papers)


@pytest.mark.parametrize("name", estimator_names())
def test_coefficients_are_taken_by_those_with_per_token_rewards(name: str) -> None:
    assert {"kl_coef", "distill_coef"} & set(estimator_keywords(name)) == (
        {"kl_coef", "distill_coef"} if name in SHAPED else set()
    )
    assert build_estimator(name).optional == ({"token_rewards"} if name in SHAPED else frozenset())


@pytest.mark.parametrize("name", estimator_names())
def test_needs_follow_the_coefficients(name: str) -> None:
    always = ALWAYS.get(name, set())
    assert build_estimator(name).needs == always
    if name in SHAPED:
        assert build_estimator(name, kl_coef=0.1).needs == always | {"kl"}
        assert build_estimator(name, distill_coef=0.1).needs == always | {
            "teacher_logprobs",
            "logprobs",
        }


@pytest.mark.parametrize("name", SHAPED)
def test_the_kl_stays_raw(name: str) -> None:
    inputs = random_inputs()
    before = {
        field: getattr(inputs, field).clone()
        for field in ("kl", "logprobs", "teacher_logprobs", "token_rewards")
    }
    build_estimator(name, kl_coef=0.3, distill_coef=0.2)(inputs)
    # without the guard's copies
    build_estimator(name, kl_coef=0.3, distill_coef=0.2).estimator(inputs)
    for field, value in before.items():
        assert torch.equal(getattr(inputs, field), value)
        assert getattr(inputs, field)._version == 0


@pytest.mark.parametrize(
    ("name", "options", "missing", "hint"),
    [
        ("ppo", {}, "values", r"set critic\.path"),
        ("vapo", {}, "values", r"set critic\.path"),
        ("ppo", {"kl_coef": 0.1}, "kl", r"set algorithm\.kl\.reward_coef"),
        ("rloo", {"kl_coef": 0.1}, "kl", r"set algorithm\.kl\.reward_coef"),
        ("remax", {}, "baseline_rewards", r"rollout"),
        ("gdpo", {}, "reward_parts", r"reward\.parts"),
        ("reinforce++", {"distill_coef": 0.1}, "teacher_logprobs", r"teacher"),
    ],
)
def test_a_missing_field_says_what_to_set(
    name: str, options: dict[str, float], missing: str, hint: str
) -> None:
    with pytest.raises(MissingInputError, match=rf"{missing!r} is missing: .*{hint}"):
        build_estimator(name, **options)(random_inputs(**{missing: None}))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ppo", {"gamma": 1.5}), ("ppo", {"lam": -0.1}), ("ppo", {"kl_coef": -1.0}), ("grpo", {
         "eps": 0.0}),
        ("reinforce++", {"gamma": float("nan")}), ("reinforce++", {"kl_coef": float("inf")}),
        ("reinforce++_baseline", {"distill_coef": -0.5}), ("remax", {"kl_coef": float("nan")}),
        ("rloo", {"distill_coef": float("inf")}), ("vapo", {"alpha": 0.0}), ("vapo", {"actor_lam":
         1.01}),
        ("vapo", {"critic_lam": -0.01}), ("vapo", {"gamma": 2.0}), ("gdpo", {"eps": 0.0}),
    ],
)  # fmt: skip
def test_senseless_settings_are_refused(name: str, options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        build_estimator(name, **options)


@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "max_rl", "reinforce++", "ppo", "vapo"]
)
def test_a_nan_reward_is_an_error_that_names_the_sequence(name: str) -> None:
    rewards = torch.tensor([1.0, 0.5, float("nan"), 0.0])
    inputs = EstimatorInputs(
        cu_seqlens=cu((2, 1, 3, 1)),
        rewards=rewards,
        group_ids=torch.tensor([0, 0, 1, 1]),
        values=torch.zeros(7),
    )
    with pytest.raises(OutputError, match="first in sequence 2"):
        build_estimator(name)(inputs)
