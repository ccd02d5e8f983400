"""Checks of `rollout.max_staleness`: generation ahead of the trainer. Pure: no torch, no files, no
network.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.derived import generates
from rlcore.config.messages import Problem
from rlcore.config.sections.root import Config

KEY = "rollout.max_staleness"


def ahead(config: Config) -> Iterator[Problem]:
    """Generation runs ahead of a trainer that trains."""
    if (steps := config.rollout.max_staleness) > 0 and config.training.debug == "rollout_only":
        yield Problem(
            KEY,
            f"got {steps}, but training.debug: rollout_only trains nothing to run ahead of: set it"
            " to 0",
        )


def ahead_notes(config: Config) -> Iterator[Problem]:
    """What has another effect than one may think."""
    steps = config.rollout.max_staleness
    algorithm = config.algorithm
    compares = algorithm.correction.name != "none" or algorithm.loss.name == "decoupled_ppo"
    if steps > 1 and generates(config) and not compares and algorithm.old_logprobs != "rollout":
        message = (
            f"'none' with {KEY} {steps}: tokens count as if the weights before their step had made"
            " them: consider tis, "
        )
        yield Problem("algorithm.correction.name", message + "or algorithm.old_logprobs: rollout")
