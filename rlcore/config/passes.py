"""Which models a step scores before it updates the policy. Pure: no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlcore.config.derived import (
    GROUP_ESTIMATORS,
    SHAPED_REWARDS,
    coefficients,
    needs_critic,
    needs_reference,
    needs_teacher,
    updates_per_step,
)
from rlcore.config.sections.root import Config

# Built-in algorithms, for plans on a machine without torch; what a plugin needs is asked of the
# plugin.
VALUE_ESTIMATORS = frozenset({"ppo", "vapo"})
LOSSES = frozenset({
    "cispo", "clip_cov", "decoupled_ppo", "geo_mean", "gspo", "gspo_token", "kl_cov", "ppo_clip", "reinforce", "sapo", "sft",
})  # fmt: skip
# need all of an optimizer step before it is split
WHOLE_STEP_LOSSES = frozenset({"clip_cov", "kl_cov"})


@dataclass(frozen=True)
class Passes:
    """Passes without gradients, one each; a model whose pass a step never makes is not loaded."""

    policy: bool
    reference: bool
    teacher: bool
    critic: bool

    @property
    def count(self) -> int:
        return sum((self.policy, self.reference, self.teacher, self.critic))


def passes(
    config: Config,
    *,
    estimator_needs: Collection[str],
    loss_needs: Collection[str],
    whole_step_loss: bool,
) -> Passes:
    """Of the configured algorithm.

    Args:
        estimator_needs, loss_needs: the fields that the built estimator and policy loss declare.
        whole_step_loss: the loss needs the log-probs of all of an optimizer step before it is
            split.
    """
    reference = needs_reference(config, {*estimator_needs, *loss_needs})
    critic = needs_critic(estimator_needs)
    policy = not config.is_sft and (
        whole_step_loss
        or _scored_before_update(config, estimator_needs, reference=reference, critic=critic)
    )
    return Passes(policy, reference, needs_teacher(config, estimator_needs), critic)


def built_in_passes(config: Config) -> Passes | None:
    """`passes` where estimator and loss are built in; None where a plugin has to be asked."""
    estimator = config.algorithm.estimator.name
    loss = config.algorithm.loss.name
    if estimator not in SHAPED_REWARDS | GROUP_ESTIMATORS or loss not in LOSSES:
        return None
    needs = {"values"} if estimator in VALUE_ESTIMATORS else set()
    if estimator in SHAPED_REWARDS:
        given = coefficients(config)
        needs |= {"kl"} if given["kl_coef"] else set()
        needs |= {"logprobs", "teacher_logprobs"} if given["distill_coef"] else set()
    return passes(
        config, estimator_needs=needs, loss_needs=(), whole_step_loss=loss in WHOLE_STEP_LOSSES
    )


def _scored_before_update(
    config: Config, needs: Collection[str], *, reference: bool, critic: bool
) -> bool:
    """Whether the policy needs a pass of its own, since no update sees the whole batch with the
    weights that it had.
    """
    algorithm = config.algorithm
    training = config.training
    if (
        algorithm.old_logprobs == "recompute"
        or training.early_stopping
        or config.policy.routing_replay == "logprobs"
    ):
        return True
    if algorithm.kl.reward_coef or not {"kl", "logprobs"}.isdisjoint(needs):
        return True
    updated_once = (
        updates_per_step(config) == 1
        and training.debug != "rollout_only"
        and not (critic and config.critic.warmup_steps)
    )
    return not updated_once and (algorithm.old_logprobs == "auto" or reference)
