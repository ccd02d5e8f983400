"""Checks of the algorithm. Pure: no torch, no files, no network."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.built_in import ESTIMATORS
from rlcore.config.derived import (
    COEFFICIENTS,
    PART_WEIGHTS,
    coefficients,
    generates,
    takes_coefficients,
    updates_per_step,
)
from rlcore.config.messages import Problem
from rlcore.config.sections.root import Config

DECOUPLED = "decoupled_ppo"  # the loss that corrects for the engine itself


def reward_terms(config: Config) -> Iterator[Problem]:
    """No KL, distillation or entropy coefficient is left unused."""
    algorithm = config.algorithm
    for keyword, path in COEFFICIENTS.items():
        if keyword in algorithm.estimator.options:
            yield Problem(
                f"algorithm.estimator.{keyword}", f"set {path} instead; estimators are given it"
            )
    if PART_WEIGHTS in algorithm.estimator.options:
        yield Problem(
            f"algorithm.estimator.{PART_WEIGHTS}",
            "set reward.parts.NAME.weight instead; the estimator is given them",
        )
    if "kl_coef" in algorithm.loss.options:
        yield Problem(
            "algorithm.loss.kl_coef",
            "set algorithm.kl.loss_coef instead; it is added to every loss",
        )
    if config.is_sft:
        used = {
            "algorithm.kl.reward_coef": algorithm.kl.reward_coef,
            "algorithm.kl.loss_coef": algorithm.kl.loss_coef,
            "algorithm.distillation.coef": algorithm.distillation.coef,
            "algorithm.entropy_coef": algorithm.entropy_coef,
        }
        for path, value in used.items():
            if value:
                yield Problem(path, f"got {value:g}, but the sft loss has no such term: remove it")
        return
    if takes_coefficients(config) is False:
        yield from (
            coefficient_ignored(config, keyword)
            for keyword, value in coefficients(config).items()
            if value
        )
    if algorithm.distillation.coef and config.teacher.path is None:
        yield Problem(
            "teacher.path",
            "missing: algorithm.distillation.coef is not 0, so name the model to learn from",
        )


def coefficient_ignored(config: Config, keyword: str) -> Problem:
    """Refuse a coefficient of the reward that the estimator has no keyword for."""
    name = config.algorithm.estimator.name
    got = f"got {coefficients(config)[keyword]:g}, but estimator "
    term, instead = {
        "kl_coef": ("KL", "set algorithm.kl.loss_coef, or algorithm.kl.monitor to watch KL alone"),
        "distill_coef": (
            "distillation",
            "choose one with rewards a token, such as reinforce++ or ppo",
        ),
    }[keyword]
    return Problem(
        COEFFICIENTS[keyword],
        f"{got}{name!r} takes no {term} into its reward and would ignore it: {instead}",
    )


def apart(config: Config) -> Iterator[Problem]:
    """An estimator that takes the parts of the reward apart ignores no key about their sum."""
    declared = ESTIMATORS.get(config.algorithm.estimator.name)
    if declared is not None and "reward_parts" in declared.needs and not config.is_sft:
        yield from sum_ignored(config)


def sum_ignored(config: Config) -> Iterator[Problem]:
    """Refuse what changes the sum of the reward and none of its parts."""
    reward = config.reward
    name = config.algorithm.estimator.name
    why = f"estimator {name!r} takes the parts of the reward and would ignore it: "
    if reward.non_stop_penalty is not None:
        message = "replaces the sum, and " + why + "make it a part of its own, as `overlong` is"
        yield Problem("reward.non_stop_penalty", message)
    if reward.on_error not in ("drop", 0.0):
        message = f"got {reward.on_error:g}, a value of the sum, and {why}"
        yield Problem(
            "reward.on_error",
            message + "drop such samples, or set 0: what failed counts for nothing",
        )


def loss_terms(config: Config) -> Iterator[Problem]:
    """The loss that corrects for the engine itself gets the policy before the step."""
    algorithm = config.algorithm
    loss = config.algorithm.loss
    if loss.name == DECOUPLED and algorithm.old_logprobs == "rollout":
        message = (
            f"loss {DECOUPLED!r} keeps the policy before the step apart from the engine's: set"
            " recompute or auto"
        )
        yield Problem("algorithm.old_logprobs", message)


def correction(config: Config) -> Iterator[Problem]:
    """A correction has two log-probs to compare."""
    algorithm = config.algorithm
    given = config.algorithm.correction
    path = "algorithm.correction"
    if config.is_sft and given.max_staleness is not None:
        yield Problem(
            f"{path}.max_staleness",
            "supervised fine-tuning trains on labels, which have no version: remove it",
        )
    if given.name == "none":
        return
    if config.is_sft:
        yield Problem(
            f"{path}.name",
            "supervised fine-tuning has no engine whose log-probs could differ: remove it",
        )
    elif algorithm.old_logprobs == "rollout":
        yield Problem(
            f"{path}.name",
            f"{given.name!r} compares the trainer's log-probs with the engine's, and"
            " algorithm.old_logprobs: rollout takes the engine's for both: set recompute or auto"
            " there, or none here",
        )
    elif algorithm.loss.name == DECOUPLED:
        message = (
            f"loss {DECOUPLED!r} has this ratio as a weight of its own, so {given.name!r} would"
            " apply it twice: set none"
        )
        yield Problem(f"{path}.name", message)


def algorithm_notes(config: Config) -> Iterator[Problem]:
    """Yield keys of loss and correction that change nothing."""
    algorithm = config.algorithm
    if (
        algorithm.loss.name == "kl_cov"
        and updates_per_step(config) == 1
        and algorithm.old_logprobs != "rollout"
    ):
        message = (
            "'kl_cov' penalises nothing: its |log ratio| has no gradient before the second"
            " optimizer step of a batch"
        )
        yield Problem("algorithm.loss.name", message)
    if (
        algorithm.loss.per_rollout
        and not config.is_sft
        and config.rollout.workflow.name == "single_turn"
    ):
        yield Problem(
            "algorithm.loss.per_rollout",
            "changes nothing: workflow single_turn makes one sample a rollout",
        )
    oldest = config.rollout.max_staleness
    limit = algorithm.correction.max_staleness
    if limit is not None and limit >= oldest and config.training.debug != "train_only":
        message = (
            f"masks nothing: rollout.max_staleness is {oldest}, so no token is older than that"
        )
        yield Problem("algorithm.correction.max_staleness", message)
    elif limit is not None and config.rollout.on_update == "drain" and generates(config):
        message = (
            f"{limit} is below rollout.max_staleness ({oldest}), and with rollout.on_update: drain"
            " all tokens of a response are equally old: whole responses are masked, or whole steps."
            f" Lower rollout.max_staleness to {limit}, or let on_update be in_place, retract or"
            " abort"
        )
        yield Problem("algorithm.correction.max_staleness", message)
