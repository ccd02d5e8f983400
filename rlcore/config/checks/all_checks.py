"""All checks across sections, in their order, made when a configuration is loaded.

A check is a function that yields a `Problem` for every key that is wrong; `rlcore validate` prints
the first paragraph of its docstring. A function `..._notes` yields what is legal but has no effect,
or not the expected one. Pure: no torch, no files, no network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rlcore.config.checks.algorithm import algorithm_notes, correction, loss_terms, reward_terms
from rlcore.config.checks.colocated import colocated, colocated_notes, engine_gpus
from rlcore.config.checks.engine import engine_kind, engine_notes, engine_servers, engine_transport
from rlcore.config.checks.policy import fp8, layout, lengths, routing
from rlcore.config.checks.ray import ray_launcher, ray_notes
from rlcore.config.checks.rollout import sampling_masks, sampling_notes, staleness, staleness_notes
from rlcore.config.checks.servers import managed_servers
from rlcore.config.checks.training import (
    batch,
    data,
    debugging,
    early_stopping,
    evaluation_notes,
    length,
    optimizer_notes,
    optimizers,
    sft_notes,
    training_notes,
)
from rlcore.config.messages import Problem
from rlcore.config.sections.root import Config

Check = Callable[[Config], Iterator[Problem]]

CHECKS: tuple[Check, ...] = (
    length,
    early_stopping,
    reward_terms,
    loss_terms,
    correction,
    batch,
    layout,
    fp8,
    lengths,
    routing,
    sampling_masks,
    engine_kind,
    engine_servers,
    managed_servers,
    engine_transport,
    engine_gpus,
    colocated,
    staleness,
    ray_launcher,
    optimizers,
    debugging,
    data,
)

NOTES: tuple[Check, ...] = (
    training_notes,
    algorithm_notes,
    engine_notes,
    colocated_notes,
    staleness_notes,
    ray_notes,
    optimizer_notes,
    evaluation_notes,
    sft_notes,
    sampling_notes,
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
