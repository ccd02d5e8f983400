"""Curricula by name: register one, build one, and hold it to what a draw needs of its weights.

One comes from the decorator here, from an entry point of an installed package (group
`rlcore.curricula`) or from an import path `package.module:Name` in the config.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.algorithms.keywords import Keyword, constructor_keywords
from rlcore.algorithms.plugins import Factory, Registry
from rlcore.data.curriculum.results import PromptHistory
from rlcore.errors import RunFailed
from rlcore.import_paths import place_of

Curriculum = Callable[[PromptHistory], NDArray[np.float64]]
"""Returns the weight of each prompt, [N]: a pure function of the history.

The probability of a prompt is its weight by the sum of those of all that may be drawn. It has no
state of its own: what it may know is in the history, which a resumed run has again.
"""

_CURRICULA = Registry("curriculum", "rlcore.curricula", ())


class GuardedCurriculum:
    """A curriculum by its name, whose weights are checked.

    Raises RunFailed where it raises, or returns what is no weight of each prompt.
    """

    def __init__(self, name: str, curriculum: Curriculum) -> None:
        self.name = name
        self.curriculum = curriculum

    def __call__(self, history: PromptHistory) -> NDArray[np.float64]:
        where = f"data.curriculum: {self.name!r}"
        try:
            given = self.curriculum(history)
        except (Exception, SystemExit) as error:
            place = place_of(self.curriculum, error)
            raise RunFailed(f"{where} failed: {type(error).__name__}: {error}{place}") from error
        if not isinstance(given, np.ndarray) or given.shape != (len(history),):
            got = f"shape {given.shape}" if isinstance(given, np.ndarray) else type(given).__name__
            raise RunFailed(
                f"{where} returned {got}, expected an array [N] = [{len(history)}], a weight a"
                " prompt"
            )
        if given.dtype.kind not in "fiu":
            raise RunFailed(f"{where} returned {given.dtype}, expected numbers")
        weights = given.astype(np.float64)
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if len(bad):
            raise RunFailed(
                f"{where} gave prompt {bad[0]} the weight {weights[bad[0]]}, expected a finite"
                f" number >= 0 ({len(bad)} of {len(weights)} prompts)"
            )
        if not 0 < float(weights.sum()) < np.inf:
            raise RunFailed(
                f"{where} returned weights with the sum {weights.sum()}, expected a finite number"
                " above 0: some prompt must be drawn"
            )
        return weights


def register_curriculum(name: str) -> Callable[[Factory], Factory]:
    """Register a class as curriculum `name`; its constructor's keywords become its config keys."""
    return _CURRICULA.register(name)


def build_curriculum(name: str | Callable[..., Any], **keywords: Any) -> GuardedCurriculum:
    """Build a curriculum by name, import path or class, with checked keywords and guard."""
    built = _CURRICULA.build(name, keywords)
    return GuardedCurriculum(built.name, built.instance)


def guard_curriculum(instance: Curriculum) -> GuardedCurriculum:
    """Put a curriculum that is built already, or a bare function, behind its guard."""
    built = _CURRICULA.describe(instance)
    return GuardedCurriculum(built.name, built.instance)


def curriculum_keywords(name: str) -> dict[str, Keyword]:
    """Return the config keys of a curriculum: name, annotation and default of each."""
    return constructor_keywords(_CURRICULA.resolve(name).factory, f"curriculum {name!r}")
