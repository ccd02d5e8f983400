"""The rewards `format` and `overlong`, which look at a response's shape."""

from __future__ import annotations

import re

from rlcore.data.sample import Sample
from rollout.rewards.base import Verdict


class Format:
    """1 where the whole response matches `pattern`, else 0. `.` matches line ends too.

    Raises:
        ValueError: at construction; `pattern` is no regular expression.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error

    def __call__(self, sample: Sample) -> float:
        """Score one sample."""
        return float(self._pattern.fullmatch(sample.response_text.strip()) is not None)


def overlong(sample: Sample, buffer: int, max_tokens: int) -> Verdict:
    """DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4), from 0 down to -1.

    With y the response's tokens, L the limit and c the buffer:

        0                    |y| <= L - c
        (L - c - |y|) / c    L - c < |y| <= L
        -1                   L < |y|

    Tokens are those that the policy made, over all turns, also those that are in other samples of
    the rollout or in none. The part's `weight` is verl's `penalty_factor`.
    """
    made = sample.measured.get("generated_tokens", sample.num_trainable)
    over = made - (max_tokens - buffer)
    return Verdict(-min(max(over, 0) / buffer, 1.0))
