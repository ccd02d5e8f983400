"""Refuses labels that a built-in grader cannot read, when the prompts are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rlcore.config import Config
from rlcore.config.sections.graders import GRADERS
from rlcore.data.prompts import PromptSet
from rlcore.errors import ConfigError, DataError
from rollout.rewards.by_source import PartsBySource
from rollout.rewards.graders.code_tests import read_tests
from rollout.rewards.graders.ifeval import constraints_of
from rollout.rewards.graders.places import accepted

# a grader's kind of label -> reads it from label and row, or raises ValueError
READERS: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "text": lambda label, _: accepted(label),
    "constraints": constraints_of,
    "tests": lambda label, _: read_tests(label),
}
# the columns inside a label that is a map, the likeliest first (verl's is ground_truth)
LIKELY = ("ground_truth", "answer", "target", "label", "solution", "value", "text")


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
            if kind != "constraints":  # these may stand in columns of their own
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
                _check(config, name, kinds[name], example.where, example.label, example.extra)


def _check(
    config: Config, part: str, kind: str, where: str, label: Any, row: Mapping[str, Any]
) -> None:
    try:
        READERS[kind](label, row)
    except ValueError as error:
        hint = likely_key(str(config.data.label_key), label) if kind == "text" else ""
        raise DataError(f"{where}: {error} for reward.parts.{part}{hint}") from error


def likely_key(label_key: str, label: Any) -> str:
    """What to set `data.label_key` to where the label is a map, as the end of a message."""
    if not isinstance(label, Mapping):
        return ""
    texts = [key for key, value in label.items() if isinstance(value, str | int | float | list)]
    near = [key for key in LIKELY if key in texts] or (texts if len(texts) == 1 else [])
    keys = ", ".join(map(str, label))
    meant = f"; did you mean data.label_key={label_key}.{near[0]}?" if near else ""
    return f"; the label is a map of {keys}{meant}"
