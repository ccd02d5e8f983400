"""The reward `reasoning_gym`: an answer's score by the row's own task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcore.data.paths.reasoning_gym import COLUMN, PREFIX, load_library, score
from rlcore.data.sample import Sample
from rollout.rewards.graders.text import answer_at


class ReasoningGym:
    """Calls the scorer of the task that made the row. An answer for which it raises is wrong."""

    def __init__(self, answer: str = "all") -> None:
        # load it before a call's deadline runs
        load_library("the grader reasoning_gym")
        self._place = answer

    def __call__(self, sample: Sample) -> dict[str, Any]:
        """Score from 0 to 1; an answer with score 1 is right."""
        column = entry_of(sample.metadata)
        found = answer_at(sample.response_text, self._place)
        if found is None or not found.strip():
            return {"score": 0.0, "correct": False}
        info = {"answer": found.strip()}
        try:
            points = score(column, found.strip())
        # scorers parse the answer, and may raise anything for an unexpected form
        except Exception as error:  # noqa: BLE001
            info["raised"] = f"{type(error).__name__}: {error}"[:200]
            points = 0.0
        return {"score": points, "correct": points >= 1.0, "info": info}


def entry_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The column with the row's task. Raises ValueError for a row without the column."""
    column = row.get(COLUMN)
    kinds = {"task": str, "settings": Mapping, "entry": Mapping}
    if (
        not isinstance(column, Mapping)
        or column.keys() != kinds.keys()
        or not all(isinstance(column[name], kind) for name, kind in kinds.items())
    ):
        raise ValueError(
            f"the row has no column {COLUMN!r} with its task, which the rows of data.paths"
            f" {PREFIX}NAME have,"
        )
    return column
