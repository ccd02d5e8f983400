"""Refuses labels that a built-in grader cannot read, when prompts are loaded."""

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

# parts of a label without content
_MARKS = re.compile(r"\\(?:boxed|fbox|text)\b|[\s${}]")


def _mathematics(label: Any, row: Mapping[str, Any]) -> None:
    """Refuse empty labels. Parsing the others would take minutes when data is loaded."""
    for one in accepted(label):
        if not _MARKS.sub("", one):
            raise ValueError(f"the label {one!r} is no mathematics")


# readers of labels and rows by kind, which raise ValueError; `letter` also needs the choices
READERS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "text": lambda label, _: accepted(label),
    "mathematics": _mathematics,
    "constraints": constraints_of,
    "tests": read_tests,
    "entry": lambda _, row: entry_of(row),
}
# kinds of labels that are objects, or have their own columns
OBJECTS = ("constraints", "tests", "entry")


def check_labels(config: Config, prompts: PromptSet) -> None:
    """Refuse prompts that no part scores, or with a label that a grader cannot read.

    Raises:
        ConfigError: there are no labels.
        DataError: names the row, and the key that was probably meant.
    """
    rule = PartsBySource(config.reward)
    parts = {
        name: part
        for name, part in config.reward.parts.items()
        if part.function in GRADERS and GRADERS[part.function].label != "none"
    }
    if config.data.label_key is None:
        for name, part in parts.items():
            if GRADERS[str(part.function)].label not in ("constraints", "entry"):
                raise ConfigError(
                    f"reward.parts.{name} compares with a label, but data.label_key is null"
                )
    if not parts and config.reward.by is None:
        return
    for example in prompts.examples:
        try:
            chosen = rule.of(example.extra)
        except DataError as error:
            raise DataError(f"{example.where}: {error}") from error
        for name in chosen:
            if name in parts:
                _check(name, parts[name], example)


def _check(name: str, part: RewardPartConfig, example: Example) -> None:
    kind = GRADERS[str(part.function)].label
    try:
        if kind == "letter":
            letters_of(example.label, ChoiceArgs(**part.args).choices)
        else:
            READERS[kind](example.label, example.extra)
    except ValueError as error:
        if kind not in OBJECTS and not isinstance(example.label, list):
            # its error names the key that was probably meant
            check_label(example, f"reward.parts.{name}")
        raise DataError(f"{example.where}: {error} for reward.parts.{name}") from error
