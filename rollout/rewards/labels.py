"""Refuses labels that a built-in grader cannot read, when the prompts are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcore.config import Config
from rlcore.config.sections.graders import GRADERS
from rlcore.data.examples import Example, check_label
from rlcore.data.prompts import PromptSet
from rlcore.errors import ConfigError, DataError
from rollout.rewards.graders.code_tests import read_tests
from rollout.rewards.graders.ifeval import constraints_of
from rollout.rewards.graders.places import accepted
from rollout.rewards.graders.reasoning_gym import entry_of
from rollout.rewards.scorer import PartsBySource

# a grader's kind of label -> reads it from label and row, or raises ValueError
READERS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "text": lambda label, _: accepted(label),
    "constraints": constraints_of,
    "tests": lambda label, _: read_tests(label),
    "entry": lambda _, row: entry_of(row),
}


def check_labels(config: Config, prompts: PromptSet) -> None:
    """Refuse prompts that no part scores, or whose label a grader cannot read.

    Raises:
        ConfigError: there are no labels.
        DataError: names the row, and the key that was probably meant.
    """
    rule = PartsBySource(config.reward)
    kinds = {
        name: GRADERS[part.function].label
        for name, part in config.reward.parts.items()
        if part.function in GRADERS and GRADERS[part.function].label != "none"
    }
    if config.data.label_key is None:
        for name, kind in kinds.items():
            if kind not in ("constraints", "entry"):  # these may stand in columns of their own
                raise ConfigError(
                    f"reward.parts.{name} compares with a label, but data.label_key is null"
                )
    if not kinds and config.reward.by is None:
        return
    for example in prompts.examples:
        try:
            chosen = rule.of(example.extra)
        except DataError as error:
            raise DataError(f"{example.where}: {error}") from error
        for name in chosen:
            if name in kinds:
                _check(name, kinds[name], example)


def _check(part: str, kind: str, example: Example) -> None:
    try:
        READERS[kind](example.label, example.extra)
    except ValueError as error:
        if kind == "text":
            check_label(example, f"reward.parts.{part}")  # it names the key that was meant
        raise DataError(f"{example.where}: {error} for reward.parts.{part}") from error
