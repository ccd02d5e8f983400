"""Rows that reasoning-gym makes, `reasoning-gym:NAME?seed=1&size=500`, and scores of answers."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl

import orjson

from rlcore.data.rows import RowFile
from rlcore.errors import DataError

PREFIX = "reasoning-gym:"
COLUMN = "reasoning_gym"
"""The column that a score needs: `{"task": name, "settings": {...}, "entry": {...}}`."""

_DEFAULTS: Mapping[str, Any] = {"seed": 0, "size": 500}  # without a seed each run has other rows
_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY


class GymRows(RowFile):
    """The rows of one task, each made when it is asked for, from the seed and its index alone.

    Raises:
        DataError: there is no such task, its settings are wrong, or its entries cannot be told to a
            scorer as JSON.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._task, given = _parsed(path)
        self._settings = {key: given[key] for key in given if key not in _DEFAULTS}
        self._dataset = _dataset(path, self._task, given)
        self._check_json()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        made = self._dataset[index]
        entry = orjson.loads(orjson.dumps(made, option=_OPTIONS))
        return {
            "question": entry["question"],
            "answer": entry["answer"],
            COLUMN: {"task": self._task, "settings": self._settings, "entry": entry},
        }

    def _check_json(self) -> None:
        """Refuse a task whose scorer does not know its own answer once the entry was JSON."""
        row = self[0]
        answer = row["answer"]
        if answer is None:
            return
        before = self._dataset.score_answer(answer, self._dataset[0])
        after = self._dataset.score_answer(answer, row[COLUMN]["entry"])
        if before != after:
            raise DataError(
                f"{self._name}: the scorer of {self._task!r} gives its own answer {before:g}, and"
                f" {after:g} once the entry was stored as JSON: such a task cannot be trained on"
            )


def check_gym_path(path: str) -> None:
    """Refuse (DataError) what names no task, or settings that it does not take; makes no row."""
    _dataset(path, *_parsed(path))


def score(column: Mapping[str, Any], answer: str) -> float:
    """Return what a task says of an answer, 0 to 1.

    Args:
        column: of the row, at `COLUMN`.

    Raises:
        Exception: whatever the task's scorer raises, where it cannot read the answer.
    """
    settings = orjson.dumps(column["settings"], option=orjson.OPT_SORT_KEYS)
    return float(_scorer(column["task"], settings).score_answer(answer, column["entry"]))


def load_library(what: str) -> Any:
    """Import reasoning-gym, which takes some 2 s. Raises DataError where it is not installed."""
    try:
        with warnings.catch_warnings():
            # of a package of its own needs, which compares with a literal by `is`
            warnings.simplefilter("ignore", SyntaxWarning)
            import reasoning_gym
    except ImportError as error:
        raise DataError(
            f"{what}: install the extra: pip install 'rlcore[reasoning-gym]' ({error})"
        ) from error
    return reasoning_gym


@lru_cache(maxsize=128)
def _scorer(task: str, settings: bytes) -> Any:
    """Return a data set of one row: scorers are its methods, and may read its settings."""
    return load_library(task).create_dataset(task, size=1, seed=0, **orjson.loads(settings))


def _parsed(path: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the settings of a path; values are JSON, or else texts."""
    name, _, query = path.removeprefix(PREFIX).partition("?")
    given = dict(_DEFAULTS)
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise DataError(
            f"{path}: {error}; expected {PREFIX}NAME?seed=1&size=500&KEY=VALUE"
        ) from error
    for key, text in pairs:
        try:
            given[key] = orjson.loads(text)
        except orjson.JSONDecodeError:
            given[key] = text
    for key in _DEFAULTS:
        if not isinstance(given[key], int) or given[key] < (key == "size"):
            raise DataError(f"{path}: {key}: got {given[key]!r}, expected a whole number")
    return name, given


def _dataset(path: str, name: str, settings: Mapping[str, Any]) -> Any:
    library = load_library(path)
    known = library.factory.DATASETS
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(
            f"{path}: reasoning-gym has no task {name!r}{hint} (it has {len(known)}:"
            f" {', '.join(sorted(known))})"
        )
    try:
        return library.create_dataset(name, **settings)
    except (TypeError, ValueError, AssertionError) as error:  # what its checks of settings raise
        keys = sorted(known[name][1].__dataclass_fields__)
        raise DataError(
            f"{path}: {type(error).__name__}: {error}; the task has the settings {', '.join(keys)}"
        ) from error
