from __future__ import annotations

import pytest

from rlcore.config import derived


@pytest.mark.parametrize(
    ("overrides", "needs", "expected"),
    [
        ([], (), False),
        (["algorithm.kl.loss_coef=0.1"], (), True),
        (["algorithm.estimator.name=ppo", "algorithm.kl.reward_coef=0.1"], (), True),
        (["algorithm.kl.monitor=true"], (), True),
        (["training.early_stopping=true", "training.target_kl=0.1"], (), True),
        (["training.target_kl=0.1"], (), False),
        ([], ("kl",), True),
        ([], ("ref_logprobs",), True),
        ([], ("values", "logprobs"), False),
        (["algorithm.loss.name=sft", "algorithm.kl.monitor=true"], ("kl",), False),
    ],
)
def test_reference(load, overrides, needs, expected):
    assert derived.needs_reference(load(*overrides).config, needs) is expected


def test_critic():
    assert derived.needs_critic({"values", "kl"})
    assert not derived.needs_critic({"kl"})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("ppo", True), ("reinforce++", True), ("reinforce++_baseline", True), ("grpo", False), ("dr_grpo", False),
     ("rloo", False), ("opo", False), ("remax", False), ("mine:Own", False)],
)
def test_advantages_are_whitened_where_the_field_does(load, name, expected):
    config = load(f"algorithm.estimator.name={name}").config
    assert derived.normalize_advantages(config) is expected
    config.algorithm.normalize_advantages = not expected
    assert derived.normalize_advantages(config) is not expected


def test_the_reward_coefficient_reaches_estimators_that_take_it(load):
    ppo = load("algorithm.estimator={name: ppo, lam: 0.9}", "algorithm.kl.reward_coef=0.1").config
    assert derived.estimator_options(ppo) == {"lam": 0.9, "kl_coef": 0.1}
    assert derived.estimator_options(load("algorithm.estimator.eps=1.0").config) == {"eps": 1.0}
    own = load("algorithm.estimator.name=mine:Own", "algorithm.kl.reward_coef=0.1").config
    assert derived.takes_kl_coef(own) is None
    assert derived.estimator_options(own, ["kl_coef"]) == {"kl_coef": 0.1}
    assert derived.estimator_options(own, ["gamma"]) == {}


@pytest.mark.parametrize(
    ("overrides", "prompts", "expected"),
    [
        (["training.steps=7"], 0, 7),
        (["training.steps=null", "training.episodes=65"], 0, 3),
        (["training.steps=null", "training.episodes=64"], 0, 2),
        (["training.steps=null", "training.epochs=2"], 10, 5),
        (["training.steps=null", "training.epochs=0.01"], 10, 1),
        (["training.steps=null", "training.epochs=2", "algorithm.loss.name=sft"], 10, 4),
    ],
)
def test_total_steps(load, overrides, prompts, expected):
    sizes = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=8", "training.batch_size=5")
    assert derived.total_steps(load(*sizes, *overrides).config, prompts) == expected


def test_epochs_of_nothing_are_refused(load):
    config = load("training.steps=null", "training.epochs=2").config
    with pytest.raises(ValueError, match="number of prompts, got 0"):
        derived.total_steps(config, 0)


def test_optimizer_steps_and_sizes(load):
    config = load("training.steps=7", "algorithm.epochs=2", "algorithm.minibatches=3", "rollout.prompts_per_step=4").config
    assert derived.optimizer_steps(config, 0) == 42
    assert derived.samples_per_step(config) == 32
    assert derived.prompts_per_step(config) == 4
    assert derived.model_parallel_size(config) == 1
