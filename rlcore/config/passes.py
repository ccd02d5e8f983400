"""The models that a step scores before it updates the policy. Pure: no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rlcore.config.built_in import built_in_estimators, built_in_losses
from rlcore.config.derived import needs_critic, needs_reference, needs_teacher, updates_per_step
from rlcore.config.sections.root import Config


@dataclass(frozen=True)
class Passes:
    """The passes of a step without gradients; a model without a pass is not loaded."""

    policy: bool
    reference: bool
    teacher: bool
    critic: bool

    @property
    def count(self) -> int:
        """How many passes a step makes."""
        return sum((self.policy, self.reference, self.teacher, self.critic))


def passes(
    config: Config,
    *,
    estimator_needs: Collection[str],
    loss_needs: Collection[str],
    whole_step_loss: bool,
) -> Passes:
    """Return the passes of the configured algorithm.

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
    """Return `passes` if estimator and loss are built in; None if a plugin must be asked."""
    estimator = built_in_estimators().get(config.algorithm.estimator.name)
    loss = built_in_losses().get(config.algorithm.loss.name)
    if estimator is None or loss is None:
        return None
    return passes(
        config,
        estimator_needs=estimator.needs,
        loss_needs=loss.needs,
        whole_step_loss=loss.batch_stats,
    )


def _scored_before_update(
    config: Config, needs: Collection[str], *, reference: bool, critic: bool
) -> bool:
    """Return whether the policy needs a pass of its own before the update.

    It needs none where one update sees the whole batch with the weights that made it.
    """
    algorithm = config.algorithm
    training = config.training
    if (
        algorithm.old_logprobs == "recompute"
        or training.early_stopping
        or config.policy.routing_replay == "logprobs"
    ):
        return True
    in_reward = algorithm.kl.reward_coef or algorithm.distillation.coef
    if in_reward or not {"kl", "logprobs"}.isdisjoint(needs):
        return True
    updated_once = (
        updates_per_step(config) == 1
        and training.debug != "rollout_only"
        and not (critic and config.critic.warmup_steps)
    )
    return not updated_once and (algorithm.old_logprobs == "auto" or reference)
