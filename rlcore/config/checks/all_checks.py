"""All checks across sections, in their order, made when a configuration is loaded.

A check is a function that yields a `Problem` for every key that is wrong; `rlcore validate` prints
the first paragraph of its docstring. A function `..._notes` yields what is legal but has no effect,
or not the expected one. Pure: no torch, no files, no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlcore.config.checks import (
    algorithm,
    engine,
    evaluation,
    policy,
    ray,
    reward,
    rollout,
    training,
)
from rlcore.config.messages import Problem
from rlcore.config.sections.root import Config

Check = Callable[[Config], Iterator[Problem]]

CHECKS: tuple[Check, ...] = (
    training.length,
    training.early_stopping,
    algorithm.reward_terms,
    algorithm.apart,
    algorithm.loss_terms,
    algorithm.correction,
    training.batch,
    policy.layout,
    policy.fp8,
    policy.lengths,
    policy.routing,
    rollout.sampling_masks,
    engine.engine_kind,
    engine.engine_servers,
    engine.managed_servers,
    engine.engine_tls,
    engine.engine_transport,
    engine.engine_gpus,
    engine.colocated,
    rollout.staleness,
    rollout.curriculum,
    ray.ray_launcher,
    training.optimizers,
    training.debugging,
    training.data,
    reward.graders,
    reward.keys_over_tls,
    evaluation.evaluation,
    evaluation.best_checkpoint,
)

NOTES: tuple[Check, ...] = (
    training.training_notes,
    algorithm.algorithm_notes,
    engine.engine_notes,
    engine.colocated_notes,
    rollout.staleness_notes,
    rollout.filter_notes,
    ray.ray_notes,
    training.optimizer_notes,
    evaluation.evaluation_notes,
    training.sft_notes,
    rollout.sampling_notes,
    reward.key_notes,
)


def check(config: Config) -> list[Problem]:
    """Return everything that is wrong with `config`, by every check."""
    return [problem for one in CHECKS for problem in one(config)]


def notes_on(config: Config) -> list[Problem]:
    """Return what was given and has no effect, or not the expected one."""
    return [problem for one in NOTES for problem in one(config)]


def describe_checks() -> list[str]:
    """Return one line a check."""
    paragraphs = [(one.__doc__ or one.__name__).partition("\n\n")[0] for one in CHECKS]
    return [" ".join(paragraph.split()).rstrip(".") for paragraph in paragraphs]
