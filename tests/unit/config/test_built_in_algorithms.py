"""The tables of the configuration say what the algorithms declare when they are imported."""

from __future__ import annotations

import typing
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from rlcore.algorithms import (
    Advantages,
    AggregationMode,
    EstimatorInputs,
    KLKind,
    build_estimator,
    build_policy_loss,
    estimator_keywords,
    estimator_names,
    estimator_plugin,
    policy_loss_names,
    policy_loss_plugin,
)
from rlcore.algorithms.corrections import CORRECTIONS, Correction, CorrectionLevel
from rlcore.algorithms.estimators.ppo import PPO
from rlcore.algorithms.normalization import NormalizationMode
from rlcore.config.built_in import ESTIMATORS, LOSSES
from rlcore.config.checks.algorithm import DECOUPLED
from rlcore.config.derived import COEFFICIENTS, built_in_passes
from rlcore.config.sections.algorithm import Aggregation, CorrectionConfig, Normalization
from rlcore.config.sections.algorithm import KLKind as ConfiguredKLKind
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.objective import Objective
from tests.configs import small_config


class Own:
    """An estimator of a user."""

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        return Advantages(torch.zeros(inputs.num_tokens))


class OwnPPO(PPO):
    """A subclass of a built-in estimator has no default of its own."""


BUILT_IN = [
    name
    for name in estimator_names()
    if estimator_plugin(name).factory.__module__.startswith("rlcore.")
]


def make_inputs(count: int = 4) -> EstimatorInputs:
    """Everything that an estimator may need; sequences of 2 tokens in groups of two neighbours."""
    generator = torch.Generator().manual_seed(1)
    names = ("logprobs", "ref_logprobs", "rollout_logprobs", "kl", "values", "teacher_logprobs")
    vectors = {name: torch.randn(2 * count, generator=generator) for name in names}
    return EstimatorInputs(
        cu_seqlens=torch.arange(count + 1) * 2,
        rewards=torch.rand(count, generator=generator) + 0.5,
        group_ids=torch.arange(count) // 2,
        baseline_rewards=torch.rand(count, generator=generator),
        reward_parts=torch.rand((count, 2), generator=generator),
        **vectors,
    )


def test_every_built_in_algorithm_is_in_a_table() -> None:
    assert set(BUILT_IN) == set(ESTIMATORS)
    assert {
        name
        for name in policy_loss_names()
        if policy_loss_plugin(name).factory.__module__.startswith("rlcore.")
    } == set(LOSSES)


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_an_estimator_declares_is_what_it_does(name: str) -> None:
    declared = ESTIMATORS[name]
    assert declared.needs == build_estimator(name).needs
    taken = COEFFICIENTS.keys() & estimator_keywords(name).keys()
    assert taken == (set(COEFFICIENTS) if declared.shaped_rewards else set())
    estimator = build_estimator(name)
    inputs = make_inputs()
    if declared.preferences:
        inputs = replace(inputs, rewards=torch.tensor([1.0, 0.0, 1.0, 0.0]))
    regrouped = replace(inputs, group_ids=torch.tensor([0, 1, 1, 0]))
    differs = not torch.equal(estimator(inputs).advantages, estimator(regrouped).advantages)
    assert differs is declared.compares_group is estimator_plugin(name).compares_group


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_what_a_loss_declares_is_what_it_does(name: str) -> None:
    loss = build_policy_loss(name)
    declared = LOSSES[name]
    assert (declared.needs, declared.batch_stats) == (loss.needs, loss.has_batch_stats)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ppo", "batch"), ("vapo", "batch"), ("reinforce++", "batch"), ("reinforce++_baseline",
     "batch"), ("grpo", "none"), ("dr_grpo", "none"), ("rloo", "none"), ("opo", "none"), ("remax",
     "none"), ("gpg", "none"), ("max_rl", "none"), ("gdpo", "none"), (f"{__name__}:Own", "none"), (
     f"{__name__}:OwnPPO", "none")],
)  # fmt: skip
def test_advantages_are_whitened_where_the_field_does(name: str, expected: str):
    assert estimator_plugin(name).normalization == expected


SETTINGS: tuple[dict[str, Any], ...] = (
    {"algorithm": {}},
    {"algorithm": {"minibatches": 2}},
    {"algorithm": {"old_logprobs": "recompute"}},
    {"algorithm": {"kl": {"loss_coef": 0.1}}},
    {"algorithm": {"kl": {"reward_coef": 0.1}}},
    {"algorithm": {"distillation": {"coef": 0.1}}, "teacher": {"path": "t"}},
    {"critic": {"warmup_steps": 1}},
    {"policy": {"routing_replay": "logprobs"}},
)


@pytest.mark.parametrize("settings", SETTINGS)
def test_passes_without_torch_are_those_of_a_step(settings: dict[str, Any]) -> None:
    pairs = [(estimator, "ppo_clip") for estimator in sorted(BUILT_IN)]
    if settings in SETTINGS[:3]:
        pairs += [("grpo", loss) for loss in sorted(LOSSES)]
    for estimator, loss in pairs:
        named = {"estimator": {"name": estimator}, "loss": {"name": loss}}
        algorithm = {**settings.get("algorithm", {}), **named}
        config = small_config(**{**settings, "algorithm": algorithm})
        expected = CreditAssignment(config, Objective(config.algorithm)).passes
        assert built_in_passes(config) == expected, (estimator, loss)


def test_a_plugin_is_asked_for_its_passes() -> None:
    for algorithm in ({"estimator": {"name": "mine:Mine"}}, {"loss": {"name": "mine:Mine"}}):
        assert built_in_passes(small_config(algorithm=algorithm)) is None


def test_choices_of_the_configuration_are_those_of_the_algorithms() -> None:
    for configured, offered in (
        (ConfiguredKLKind, KLKind),
        (Aggregation, AggregationMode),
        (Normalization, NormalizationMode),
        (CorrectionConfig.model_fields["level"].annotation, CorrectionLevel),
    ):
        assert set(typing.get_args(configured)) == set(typing.get_args(offered))
    assert set(typing.get_args(CorrectionConfig.model_fields["name"].annotation)) == {
        "none",
        *CORRECTIONS,
    }
    assert CorrectionConfig.keywords == {
        f.name for f in fields(Correction) if f.name not in ("name", "_")
    }


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_bounds_that_the_configuration_takes_are_bounds_that_a_correction_takes(name: str) -> None:
    for options in ({"lower": 0.0}, {"lower": 1.0}, {"upper": 1.0}, {"upper": 1e6}, {"veto": 1e-9}):
        config = CorrectionConfig.model_validate({"name": name, **options})
        assert config.name != "none"
        Correction(config.name, **config.options)


def test_the_decoupled_loss_is_called_so() -> None:
    assert DECOUPLED in policy_loss_names()
