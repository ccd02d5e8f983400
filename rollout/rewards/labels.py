"""Refuses labels that a built-in grader cannot read, when the prompts are loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from rlcore.config import Config
from rlcore.config.sections.graders import GRADERS, ChoiceArgs
from rlcore.config.sections.reward import RewardPartConfig
from rlcore.data.examples import Example, check_label
from rlcore.data.prompts import PromptSet
from rlcore.errors import ConfigError, DataError
from rollout.rewards.graders.code_tests import read_tests
from rollout.rewards.graders.ifeval import constraints_of
from rollout.rewards.graders.places import accepted
from rollout.rewards.graders.reasoning_gym import entry_of
from rollout.rewards.graders.text import letters_of
from rollout.rewards.scorer import PartsBySource

# reads what a grader wants from label and row, or raises ValueError
Reader = Callable[[Any, Mapping[str, Any]], Any]
# what is left out of a label before it must say something
_MARKS = re.compile(r"\\(?:boxed|fbox|text)\b|[\s${}]")


def _mathematics(label: Any) -> None:
    """Refuse labels that say nothing. To parse the others would take minutes at load."""
    for one in accepted(label):
        if not _MARKS.sub("", one):
            raise ValueError(f"the label {one!r} is no mathematics")


READERS: dict[str, Reader] = {
    "text": lambda label, _: accepted(label),
    "mathematics": lambda label, _: _mathematics(label),
    "constraints": constraints_of,
    "tests": read_tests,
    "entry": lambda _, row: entry_of(row),
}


def _reader(part: RewardPartConfig) -> Reader | None:
    """Return what reads the labels of a part; None where it has none, or is not built in."""
    grader = GRADERS.get(str(part.function))
    if grader is None or grader.label == "none":
        return None
    if grader is ChoiceArgs:
        choices = ChoiceArgs(**part.args).choices
        return lambda label, _: letters_of(label, choices)
    return READERS[grader.label]


def check_labels(config: Config, prompts: PromptSet) -> None:
    """Refuse prompts that no part scores, or whose label a grader cannot read.

    Raises:
        ConfigError: there are no labels.
        DataError: names the row, and the key that was probably meant.
    """
    rule = PartsBySource(config.reward)
    readers = {
        name: reader
        for name, part in config.reward.parts.items()
        if (reader := _reader(part)) is not None
    }
    if config.data.label_key is None:
        for name, reader in readers.items():
            # these may stand in columns of their own
            if reader not in (READERS["constraints"], READERS["entry"]):
                raise ConfigError(
                    f"reward.parts.{name} compares with a label, but data.label_key is null"
                )
    if not readers and config.reward.by is None:
        return
    for example in prompts.examples:
        try:
            chosen = rule.of(example.extra)
        except DataError as error:
            raise DataError(f"{example.where}: {error}") from error
        for name in chosen:
            if name in readers:
                _check(name, readers[name], example)


def _check(part: str, reader: Reader, example: Example) -> None:
    try:
        reader(example.label, example.extra)
    except ValueError as error:
        others = (READERS["constraints"], READERS["tests"], READERS["entry"])
        if reader not in others and not isinstance(example.label, list):
            check_label(example, f"reward.parts.{part}")  # it names the key that was meant
        raise DataError(f"{example.where}: {error} for reward.parts.{part}") from error
