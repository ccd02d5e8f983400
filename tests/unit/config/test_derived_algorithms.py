"""What the configuration knows of algorithms without torch is what the algorithms say of
themselves.
"""

from __future__ import annotations

import typing
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from rlcore.algorithms import (
    AggregationMode,
    EstimatorInputs,
    KLKind,
    build_estimator,
    estimator_keywords,
    estimator_names,
    estimator_plugin,
    policy_loss_names,
)
from rlcore.algorithms.corrections import CORRECTIONS, Correction, CorrectionLevel
from rlcore.algorithms.guard import ESTIMATOR_OPTIONAL, POLICY_LOSS_OPTIONAL
from rlcore.algorithms.normalization import NormalizationMode
from rlcore.config import Config
from rlcore.config.checks.algorithm import DECOUPLED
from rlcore.config.derived import COEFFICIENTS, GROUP_ESTIMATORS, NORMALIZED, SHAPED_REWARDS
from rlcore.config.passes import LOSSES, built_in_passes
from rlcore.config.sections.algorithm import Aggregation, CorrectionConfig, Normalization
from rlcore.config.sections.algorithm import KLKind as ConfiguredKLKind
from rlcore.launch.plugin_checks import FOR_ESTIMATORS, FOR_LOSSES
from rlcore.trainer.credit import CreditAssignment
from rlcore.trainer.objective import Objective

BUILT_IN = [
    name
    for name in estimator_names()
    if estimator_plugin(name).factory.__module__.startswith("rlcore.")
]


def make_inputs(count: int = 4) -> EstimatorInputs:
    """Everything that an estimator may ask for; sequences of 2 tokens in groups of two neighbours."""
    generator = torch.Generator().manual_seed(1)
    vectors = {name: torch.randn(2 * count, generator=generator) for name in (
        "logprobs", "ref_logprobs", "rollout_logprobs", "kl", "values", "teacher_logprobs")}  # fmt: skip
    return EstimatorInputs(
        cu_seqlens=torch.arange(count + 1) * 2,
        rewards=torch.rand(count, generator=generator) + 0.5,
        group_ids=torch.arange(count) // 2,
        baseline_rewards=torch.rand(count, generator=generator),
        **vectors,
    )


def test_no_built_in_estimator_is_left_out() -> None:
    assert set(BUILT_IN) == SHAPED_REWARDS | GROUP_ESTIMATORS
    assert NORMALIZED <= SHAPED_REWARDS, "the others have a scale of their own"


@pytest.mark.parametrize("name", sorted(SHAPED_REWARDS | GROUP_ESTIMATORS))
def test_who_takes_the_coefficients_of_the_reward(name: str) -> None:
    taken = COEFFICIENTS.keys() & estimator_keywords(name).keys()
    assert taken == (set(COEFFICIENTS) if name in SHAPED_REWARDS else set())


@pytest.mark.parametrize("name", sorted(SHAPED_REWARDS | GROUP_ESTIMATORS))
def test_who_compares_the_samples_of_a_group(name: str) -> None:
    estimator = build_estimator(name)
    inputs = make_inputs()
    regrouped = replace(inputs, group_ids=torch.tensor([0, 1, 1, 0]))
    differs = not torch.equal(estimator(inputs).advantages, estimator(regrouped).advantages)
    assert differs is (name in GROUP_ESTIMATORS)


@pytest.mark.parametrize("name", sorted(SHAPED_REWARDS))
def test_a_coefficient_needs_the_vectors_that_it_multiplies(name: str) -> None:
    without = build_estimator(name).needs
    assert build_estimator(name, kl_coef=0.1).needs == without | {"kl"}
    assert build_estimator(name, distill_coef=0.1).needs == without | {
        "logprobs",
        "teacher_logprobs",
    }


def make_config(settings: dict[str, Any]) -> Config:
    given = {
        "run": {"name": "x"},
        "model": {"path": "m"},
        "data": {"paths": ["d"]},
        "training": {"steps": 1},
    }
    return Config.model_validate({**given, **settings})


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
    pairs = [(estimator, "ppo_clip") for estimator in sorted(BUILT_IN)] + [
        ("grpo", loss) for loss in sorted(LOSSES)
    ]
    for estimator, loss in pairs:
        algorithm = {
            **settings.get("algorithm", {}),
            "estimator": {"name": estimator},
            "loss": {"name": loss},
        }
        config = make_config({**settings, "algorithm": algorithm})
        assert (
            built_in_passes(config) == CreditAssignment(config, Objective(config.algorithm)).passes
        ), (estimator, loss)


def test_a_plugin_is_asked_for_its_passes() -> None:
    assert set(policy_loss_names()) >= LOSSES
    for algorithm in ({"estimator": {"name": "mine:Mine"}}, {"loss": {"name": "mine:Mine"}}):
        assert built_in_passes(make_config({"algorithm": algorithm})) is None


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


def test_every_field_can_be_produced() -> None:
    assert {*FOR_ESTIMATORS, "teacher_logprobs"} == set(ESTIMATOR_OPTIONAL)
    assert set(FOR_LOSSES) == set(POLICY_LOSS_OPTIONAL)
