"""The weights of a curriculum: `pass_rate`, or a function or class by its import path."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.algorithms.errors import UnknownNameError, known_names
from rlcore.algorithms.plugins import Keyword, check_keywords, constructor_keywords, import_plugin
from rlcore.data.curriculum.results import PromptHistory
from rlcore.errors import RunFailed
from rlcore.import_paths import place_of

Weigh = Callable[[PromptHistory], NDArray[np.float64]]
"""Returns the weight of each prompt, [N]: a pure function of the history.

The probability of a prompt is its weight divided by the sum of the weights of all prompts that may
be drawn. It has no state of its own: a resumed run has the history again, and nothing else.
"""
PASS_RATE = "pass_rate"


class PassRate:
    """Prefers prompts that the policy solves sometimes.

        weight = floor + (1 - floor) (p / t)^2t ((1 - p) / (1 - t))^2(1 - t)

    p is the recent pass rate of the prompt, t the target. With a target of 1/2 that is 4 p (1 - p),
    four times the variance of a sample's verdict: a prompt that is always or never solved has
    groups of equal rewards, which teach nothing. A prompt of which nothing is known has weight 1.
    One whose newest group failed has the weight of the floor: it may fail every time.

    Args:
        target: the pass rate that is preferred most; below 1/2 for harder prompts.
        floor: the weight of a prompt that is always or never solved, so that it is tried again. 1
            makes all prompts alike.
    """

    def __init__(self, *, target: float = 0.5, floor: float = 0.1) -> None:
        if not 0.0 < target < 1.0:
            raise ValueError(f"target: expected a number between 0 and 1, got {target}")
        if not 0.0 < floor <= 1.0:
            raise ValueError(f"floor: expected a number above 0, at most 1, got {floor}")
        self.target = target
        self.floor = floor

    def __call__(self, history: PromptHistory) -> NDArray[np.float64]:
        rate = history.pass_rate
        rate = np.where(np.isnan(rate), self.target, rate)
        hits = (rate / self.target) ** (2 * self.target)
        misses = ((1 - rate) / (1 - self.target)) ** (2 * (1 - self.target))
        weights = self.floor + (1 - self.floor) * hits * misses
        return np.where(history.failed > 0, self.floor, weights)


def curriculum_keywords(name: str) -> dict[str, Keyword]:
    """Return the configuration keys of a curriculum: name, annotation and default of each.

    Raises:
        UnknownNameError: there is none of that name.
    """
    factory = _find(name)
    keywords = constructor_keywords(factory, f"curriculum {name!r}")
    if inspect.isfunction(factory):
        # the history
        keywords.pop(next(iter(keywords), ""), None)
    return keywords


def build_curriculum(name: str, **options: Any) -> Weigh:
    """Return the function of a curriculum, with its keywords given and checked.

    Raises:
        UnknownNameError: there is none of that name.
        KeywordError: a keyword that it does not take, or a value of another type.
        ValueError: what its constructor thinks of a value.
    """
    check_keywords(f"curriculum {name!r}", curriculum_keywords(name), options)
    factory = _find(name)
    if inspect.isfunction(factory):
        return functools.partial(factory, **options)
    weigh: Weigh = factory(**options)
    return weigh


def _find(name: str) -> Callable[..., Any]:
    if name == PASS_RATE:
        return PassRate
    if ":" not in name:
        raise UnknownNameError(
            f"unknown curriculum {name!r}; {known_names(name, [PASS_RATE])}; one of your own is"
            " named by its import path, 'package.module:Name'"
        )
    found: Callable[..., Any] = import_plugin(name, "curriculum")
    return found


def weigh(curriculum: Weigh, history: PromptHistory) -> NDArray[np.float64]:
    """Return the weights of a curriculum, float64 [N].

    Raises:
        RunFailed: it raises, or returns anything but a finite weight >= 0 for each prompt, of which
            some are above 0.
    """
    try:
        given = curriculum(history)
    except (Exception, SystemExit) as error:
        place = place_of(curriculum, error)
        raise RunFailed(
            f"data.curriculum failed{place}: {type(error).__name__}: {error}"
        ) from error
    where = f"data.curriculum{place_of(curriculum)}"
    if not isinstance(given, np.ndarray) or given.shape != (len(history),):
        got = f"shape {given.shape}" if isinstance(given, np.ndarray) else type(given).__name__
        raise RunFailed(
            f"{where} returned {got}, expected an array [N] = [{len(history)}], a weight a prompt"
        )
    if given.dtype.kind not in "fiu":
        raise RunFailed(f"{where} returned {given.dtype}, expected numbers")
    weights = given.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if len(bad):
        raise RunFailed(
            f"{where} gave prompt {bad[0]} the weight {weights[bad[0]]}, expected a finite number"
            f" >= 0 ({len(bad)} of {len(weights)} prompts)"
        )
    if not 0 < float(weights.sum()) < np.inf:
        raise RunFailed(
            f"{where} returned weights with the sum {weights.sum()}, expected a finite number above"
            " 0: some prompt must be drawn"
        )
    return weights
