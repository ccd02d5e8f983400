"""Reward functions of a user, good and bad. Imported by worker processes."""

from __future__ import annotations

import os
import time

from rlcore.data.sample import Sample


def length(sample: Sample) -> float:
    return float(len(sample.response_text))


def from_row(sample: Sample) -> float:
    print("a reward that prints must not break anything")
    return sample.metadata["bonus"] + (0.5 if sample.prompt_text == "1+1=" else 0.0)


def fickle(sample: Sample) -> object:
    """Misbehaves as the response says."""
    if sample.response_text == "hang":
        time.sleep(600)
    if sample.response_text == "die":
        os._exit(3)
    if sample.response_text == "raise":
        raise RuntimeError("no such book")
    return {
        "nan": float("nan"),
        "bool": True,
        "mapping": {"score": 0.5, "correct": False, "parts": {"style": 1.0}, "info": {"a": [1]}},
    }.get(sample.response_text, 1.0)


def process_id(sample: Sample) -> float:
    return float(os.getpid())


not_a_function = 3


def knows_the_column(sample: Sample) -> float:
    return float(sample.metadata["correct"] == "kept")
