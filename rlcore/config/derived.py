"""What follows from a configuration, in one place for all who need it. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from rlcore.config.root import Config

# Built-in estimators, for checks on a machine without torch; what a plugin takes is asked of the plugin.
KL_IN_REWARD = frozenset({"ppo", "reinforce++", "reinforce++_baseline"})
GROUP_ESTIMATORS = frozenset({"grpo", "dr_grpo", "rloo", "opo"})
NORMALIZED = frozenset({"ppo", "reinforce++", "reinforce++_baseline"})

REFERENCE_FIELDS = frozenset({"kl", "ref_logprobs"})


def needs_reference(config: Config, estimator_needs: Collection[str] = ()) -> bool:
    """Whether the frozen reference model is loaded.

    Args:
        estimator_needs: the fields that the built estimator and policy loss declare.
    """
    if config.is_sft:
        return False
    kl = config.algorithm.kl
    return bool(
        kl.reward_coef
        or kl.loss_coef
        or kl.monitor
        or config.training.early_stopping
        or REFERENCE_FIELDS.intersection(estimator_needs)
    )


def needs_critic(estimator_needs: Collection[str]) -> bool:
    """Whether a value model is trained."""
    return "values" in estimator_needs


def normalize_advantages(config: Config) -> bool:
    """Whether advantages are whitened over the batch after the estimator."""
    given = config.algorithm.normalize_advantages
    return config.algorithm.estimator.name in NORMALIZED if given is None else given


def takes_kl_coef(config: Config, keywords: Collection[str] | None = None) -> bool | None:
    """Whether the estimator puts KL into its reward; None if that cannot be said without its `keywords`."""
    name = config.algorithm.estimator.name
    if keywords is not None:
        return "kl_coef" in keywords
    if name in KL_IN_REWARD:
        return True
    return False if name in GROUP_ESTIMATORS else None


def estimator_options(config: Config, keywords: Collection[str] | None = None) -> dict[str, Any]:
    """The estimator's keyword arguments: its own, and `algorithm.kl.reward_coef` as `kl_coef` where it takes that.

    Args:
        keywords: the names that its constructor takes; needed for plugins only.
    """
    options = config.algorithm.estimator.options
    if takes_kl_coef(config, keywords):
        options["kl_coef"] = config.algorithm.kl.reward_coef
    return options


def samples_per_step(config: Config) -> int:
    """Sequences that one step trains on."""
    if config.is_sft:
        return config.training.batch_size
    return config.rollout.prompts_per_step * config.rollout.samples_per_prompt


def prompts_per_step(config: Config) -> int:
    """Rows of the data that one step uses up."""
    return config.training.batch_size if config.is_sft else config.rollout.prompts_per_step


def total_steps(config: Config, num_prompts: int) -> int:
    """Steps of the run; a started step counts.

    Args:
        num_prompts: rows of the data, used only where the length is given in `training.epochs`.
    """
    training = config.training
    if training.steps is not None:
        return training.steps
    if training.episodes is not None:
        return math.ceil(training.episodes / samples_per_step(config))
    if training.epochs is None:
        raise ValueError("one of training.steps, training.episodes and training.epochs must be given")
    if num_prompts < 1:
        raise ValueError(f"training.epochs needs the number of prompts, got {num_prompts}")
    return max(1, math.ceil(training.epochs * num_prompts / prompts_per_step(config)))


def updates_per_step(config: Config) -> int:
    """Optimizer steps that one batch gets."""
    return config.algorithm.epochs * config.algorithm.minibatches


def optimizer_steps(config: Config, num_prompts: int) -> int:
    """Optimizer steps of the run: what `policy.optimizer.decay_steps` defaults to."""
    return total_steps(config, num_prompts) * updates_per_step(config)


def model_parallel_size(config: Config) -> int:
    """Ranks that hold one copy of the model."""
    parallel = config.policy.parallel
    return parallel.tensor * parallel.pipeline * parallel.context
