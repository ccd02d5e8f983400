"""The curriculum of recent pass rates."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rlcore.data.curriculum.plugin import register_curriculum
from rlcore.data.curriculum.results import PromptHistory


@register_curriculum("pass_rate")
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
