"""Checks of the algorithm. Pure: no torch, no files, no network."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from rlcore.config.built_in import ESTIMATORS
from rlcore.config.derived import (
    COEFFICIENTS,
    PART_WEIGHTS,
    coefficients,
    generates,
    takes_coefficients,
    updates_per_step,
)
from rlcore.config.messages import ConfigIssue
from rlcore.config.sections.algorithm import LossConfig
from rlcore.config.sections.base import Found
from rlcore.config.sections.root import Config

DECOUPLED = "decoupled_ppo"  # the loss that itself corrects for the engine

# Losses whose gradient is that of -A * logprobs at the log-probs before the step.
_PLAIN_GRADIENTS = ("ppo_clip", "reinforce")
# Estimator keywords that other keys set -> what to do instead.
_GIVEN = {
    **{word: f"set {key} instead; estimators receive it" for word, key in COEFFICIENTS.items()},
    PART_WEIGHTS: "set reward.parts.NAME.weight instead; the estimator receives them",
}
# Coefficients of the reward -> their term, and what to do if the estimator has no such term.
_TERMS = {
    "kl_coef": ("KL", "set algorithm.kl.loss_coef, or algorithm.kl.monitor to watch KL alone"),
    "distill_coef": ("distillation", "choose one with token rewards, such as reinforce++ or ppo"),
}


def reward_terms(config: Config) -> Iterator[ConfigIssue]:
    """No KL, distillation or entropy coefficient is left unused."""
    algorithm = config.algorithm
    for keyword, message in _GIVEN.items():
        if keyword in algorithm.estimator.options:
            yield ConfigIssue(f"algorithm.estimator.{keyword}", message)
    if "kl_coef" in algorithm.loss.options:
        message = "set algorithm.kl.loss_coef instead; it is added to every loss"
        yield ConfigIssue("algorithm.loss.kl_coef", message)
    if config.learns_from_rows:
        kl = "algorithm.kl.reward_coef", "algorithm.kl.loss_coef"
        for path in (*kl, "algorithm.distillation.coef", "algorithm.entropy_coef"):
            if value := attrgetter(path)(config):
                what = config.kind_of_learning
                yield ConfigIssue(path, f"got {value:g}, but {what} has no such term: remove it")
        return
    if takes_coefficients(config) is False:
        given = [keyword for keyword, value in coefficients(config).items() if value]
        yield from (coefficient_ignored(config, keyword) for keyword in given)
    if algorithm.distillation.coef and config.teacher.path is None:
        message = "missing: algorithm.distillation.coef is not 0, so name the model to learn from"
        yield ConfigIssue("teacher.path", message)


def coefficient_ignored(config: Config, keyword: str) -> ConfigIssue:
    """Refuse a coefficient of the reward for which the estimator has no keyword."""
    got = f"got {coefficients(config)[keyword]:g}, but"
    name = config.algorithm.estimator.name
    term, instead = _TERMS[keyword]
    message = f"{got} estimator {name!r} takes no {term} into its reward and would ignore it"
    return ConfigIssue(COEFFICIENTS[keyword], f"{message}: {instead}")


def apart(config: Config) -> Iterator[ConfigIssue]:
    """No key about the sum of the reward is given to an estimator that reads its parts."""
    declared = ESTIMATORS.get(config.algorithm.estimator.name)
    if declared is not None and "reward_parts" in declared.needs and not config.is_sft:
        yield from sum_ignored(config)


def sum_ignored(config: Config) -> Iterator[ConfigIssue]:
    """Refuse keys that change the sum of the reward but none of its parts."""
    reward = config.reward
    name = config.algorithm.estimator.name
    why = f"estimator {name!r} takes the parts of the reward and would ignore it: "
    if reward.non_stop_penalty is not None:
        message = f"replaces the sum, and {why}make it a part of its own, as `overlong` is"
        yield ConfigIssue("reward.non_stop_penalty", message)
    if reward.on_error not in ("drop", 0.0):
        instead = "drop such samples, or set 0: what failed counts for nothing"
        message = f"got {reward.on_error:g}, a value of the sum, and {why}{instead}"
        yield ConfigIssue("reward.on_error", message)


def preferences(config: Config) -> Found:
    """Learning from preferences has one optimizer step a batch, and no other weights."""
    if not config.is_preference:
        return
    algorithm = config.algorithm
    name = algorithm.estimator.name
    for key in ("epochs", "minibatches"):
        if (given := getattr(algorithm, key)) > 1:
            message = f"got {given}, but the gradient of {name!r} is that of the log-probs before"
            yield (
                f"algorithm.{key}",
                f"{message} the optimizer step: set 1, and take smaller batches",
            )
    if algorithm.loss.name not in _PLAIN_GRADIENTS:
        message = f"got {algorithm.loss.name!r}, which would change the gradient of {name!r}: leave"
        yield "algorithm.loss.name", f"{message} it out"
    default = LossConfig()
    for key in ("aggregation", "per_rollout"):
        if (chosen := getattr(algorithm.loss, key)) != getattr(default, key):
            message = f"got {chosen}, but {name!r} is a mean over pairs, or answers: leave it out"
            yield f"algorithm.loss.{key}", message
    if algorithm.normalize_advantages not in (None, "none"):
        message = f"would change the gradient of {name!r}: leave it out"
        yield "algorithm.normalize_advantages", message
    if algorithm.old_logprobs == "rollout":
        yield "algorithm.old_logprobs", "got rollout, but no engine made the answers: leave it out"


def loss_terms(config: Config) -> Found:
    """The loss that corrects for the engine itself gets the policy before the step."""
    if config.algorithm.loss.name == DECOUPLED and config.algorithm.old_logprobs == "rollout":
        message = f"loss {DECOUPLED!r} keeps the policy before the step apart from the engine's"
        yield "algorithm.old_logprobs", f"{message}: set recompute or auto"


def correction(config: Config) -> Found:
    """A correction has two different log-probs to compare."""
    algorithm = config.algorithm
    name = algorithm.correction.name
    path = "algorithm.correction.name"
    if config.learns_from_rows and algorithm.correction.max_staleness is not None:
        message = f"{config.kind_of_learning} trains on rows, which have no version: remove it"
        yield "algorithm.correction.max_staleness", message
    if name == "none":
        return
    if config.learns_from_rows:
        message = f"{config.kind_of_learning} has no engine whose log-probs could differ: remove it"
        yield path, message
    elif algorithm.old_logprobs == "rollout":
        yield (
            path,
            f"{name!r} compares the trainer's log-probs with the engine's, and"
            " algorithm.old_logprobs: rollout takes the engine's for both: set recompute or auto"
            " there, or none here",
        )
    elif algorithm.loss.name == DECOUPLED:
        message = f"loss {DECOUPLED!r} has this ratio as a weight of its own, so"
        yield path, f"{message} {name!r} would apply it twice: set none"


def algorithm_notes(config: Config) -> Found:
    """Yield keys of loss and correction that change nothing."""
    algorithm = config.algorithm
    loss = algorithm.loss
    once = updates_per_step(config) == 1 and algorithm.old_logprobs != "rollout"
    if loss.name == "kl_cov" and once:
        message = "'kl_cov' penalises nothing: its |log ratio| has no gradient before the second"
        yield "algorithm.loss.name", f"{message} optimizer step of a batch"
    single_turns = config.rollout.workflow.name == "single_turn" and not config.learns_from_rows
    if loss.per_rollout and single_turns:
        message = "changes nothing: workflow single_turn makes one sample a rollout"
        yield "algorithm.loss.per_rollout", message
    oldest = config.rollout.max_staleness
    limit = algorithm.correction.max_staleness
    path = "algorithm.correction.max_staleness"
    if limit is not None and limit >= oldest and config.training.debug != "train_only":
        message = f"masks nothing: rollout.max_staleness is {oldest}, so no token is older"
        yield path, f"{message} than that"
    elif limit is not None and config.rollout.on_update == "drain" and generates(config):
        yield (
            path,
            f"{limit} is below rollout.max_staleness ({oldest}), and with rollout.on_update: drain"
            " all tokens of a response are equally old: whole responses are masked, or whole steps."
            f" Lower rollout.max_staleness to {limit}, or let on_update be in_place, retract or"
            " abort",
        )
