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
    passes = derived.passes(
        load(*overrides).config, estimator_needs=needs, loss_needs=(), whole_step_loss=False
    )
    assert passes.reference is expected


@pytest.mark.parametrize(
    ("overrides", "needs", "expected"),
    [
        ([], (), False),
        (["teacher.path=x"], (), False),
        (
            ["teacher.path=x", "algorithm.estimator.name=ppo", "algorithm.distillation.coef=1"],
            (),
            True,
        ),
        (["teacher.path=x"], ("teacher_logprobs",), True),
        (["teacher.path=x", "algorithm.loss.name=sft"], ("teacher_logprobs",), False),
    ],
)
def test_teacher(load, overrides, needs, expected):
    assert derived.needs_teacher(load(*overrides).config, needs) is expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], False),
        (["rollout.workflow=mine:Turns"], True),
        (["rollout.workflow={name: env, env: 'mine:Door'}"], True),
        (["rollout.workflow=mine:Turns", "algorithm.loss.per_rollout=false"], False),
        (["rollout.workflow=mine:Turns", "algorithm.loss.name=sft"], True),
        (["algorithm.loss={name: sft, per_rollout: false}"], False),
    ],
)
def test_the_loss_of_conversations_counts_rollouts(load, overrides, expected):
    assert derived.per_rollout_loss(load(*overrides).config) is expected


def test_critic():
    assert derived.needs_critic({"values", "kl"})
    assert not derived.needs_critic({"kl"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [("batch", "batch"), ("group", "group"), ("none", "none"), ("true", "batch"), ("on", "batch"), (
     "'yes'", "batch"), ("1", "batch"), ("false", "none"), ("Off", "none"), ("0", "none"), ("null",
     None)],
)  # fmt: skip
def test_normalization_may_be_a_yes_or_no(load, text, expected):
    config = load("algorithm.estimator.name=ppo", f"algorithm.normalize_advantages={text}").config
    assert config.algorithm.normalize_advantages == expected


def test_coefficients_reach_estimators_that_take_them(load):
    given = ("algorithm.kl.reward_coef=0.1", "algorithm.distillation.coef=0.5", "teacher.path=x")
    ppo = load("algorithm.estimator={name: ppo, lam: 0.9}", *given).config
    assert derived.estimator_options(ppo, ["gamma", "lam", "kl_coef", "distill_coef"]) == {
        "lam": 0.9, "kl_coef": 0.1, "distill_coef": 0.5}  # fmt: skip
    assert derived.estimator_options(load("algorithm.estimator.eps=1.0").config, ["eps"]) == {
        "eps": 1.0
    }
    own = load("algorithm.estimator.name=mine:Own", "algorithm.kl.reward_coef=0.1").config
    assert derived.estimator_options(own, ["kl_coef"]) == {"kl_coef": 0.1}
    assert derived.estimator_options(own, ["gamma"]) == {}


def test_an_estimator_that_weighs_the_parts_is_given_their_weights(load):
    config = load(
        "algorithm.estimator={name: gdpo, eps: 1e-3}",
        "reward.parts={a: {function: f1, weight: 2}, b: {function: math}}",
    ).config
    expected = {"eps": 1e-3, "reward_weights": [2.0, 1.0]}
    assert derived.estimator_options(config, ["eps", "reward_weights"]) == expected


def test_what_a_built_in_estimator_takes_is_known_without_torch(load):
    known = {
        name: derived.takes_coefficients(load(f"algorithm.estimator.name={name}").config)
        for name in ("ppo", "rloo", "reinforce++_baseline", "grpo", "gpg", "mine:Own")
    }
    takes = {"ppo": True, "rloo": True, "reinforce++_baseline": True}
    assert known == {**takes, "grpo": False, "gpg": False, "mine:Own": None}


@pytest.mark.parametrize(
    ("overrides", "prompts", "expected"),
    [
        (["training.steps=7"], 0, 7),
        (["training.steps=null", "training.episodes=65"], 0, 3),
        (["training.steps=null", "training.episodes=64"], 0, 2),
        (["training.steps=null", "training.epochs=2"], 10, 5),
        (["training.steps=null", "training.epochs=0.01"], 10, 1),
        (["training.steps=null", "training.epochs=2.2"], 100, 55),  # 2.2 * 100 > 220
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
    updates = ("algorithm.epochs=2", "algorithm.minibatches=3")
    config = load("training.steps=7", *updates, "rollout.prompts_per_step=4").config
    assert derived.total_steps(config, 0) * derived.updates_per_step(config) == 42
    assert derived.samples_per_step(config) == 32
    assert derived.model_parallel_size(config) == 1


@pytest.mark.parametrize(("warmup", "expected"), [(0, 42), (2, 30), (7, 1), (9, 1)])
def test_the_policy_takes_no_step_while_its_critic_warms_up(load, warmup, expected):
    updates = ("algorithm.epochs=2", "algorithm.minibatches=3")
    config = load(f"critic.warmup_steps={warmup}", *updates, "rollout.prompts_per_step=3").config
    assert derived.policy_updates(config, 42) == expected


@pytest.mark.parametrize(
    ("overrides", "multiple"),
    [
        ([], 1),
        (["tensor=2"], 1),
        (["tensor=2", "sequence=true"], 2),
        (["context=2"], 4),
        (["context=4", "tensor=2", "sequence=true"], 16),
    ],
)
def test_what_packs_are_padded_to(load, overrides, multiple):
    given = [f"policy.parallel.{override}" for override in overrides]
    config = load("cluster.launcher=torchrun", *given).config
    assert derived.pack_multiple(config) == multiple
    fp8 = load("cluster.launcher=torchrun", *given, "policy.fp8.margin=0").config
    assert derived.pack_multiple(fp8) == 16 * multiple


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ([], 1),
        (["cluster.processes_per_node=3"], 3),
        (["cluster.launcher=torchrun"], 4),  # not said: the layout's own
        (["cluster.launcher=torchrun", "cluster.nodes=2", "cluster.processes_per_node=8"], 16),
    ],
)
def test_the_ranks_of_the_run(load, overrides, ranks):
    layout = ["policy.parallel.context=4"] if ranks > 3 else []
    assert derived.world_size(load(*layout, *overrides).config) == ranks
