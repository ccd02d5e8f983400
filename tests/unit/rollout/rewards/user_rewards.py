"""Reward functions of a user: good ones, broken ones, and one that raises. Imported by workers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

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


# --- what a newcomer gets wrong -------------------------------------------------------------------


def two_arguments(sample, label):
    return 1.0


async def coroutine(sample):
    return 1.0


class NotCallable:
    pass


class Picky:
    """Gives `reward` to samples whose response is as long as `length`."""

    def __init__(self, length, reward=1.0):
        if length < 0:
            raise ValueError(f"length {length} is negative")
        self.length = length
        self.reward = reward
        self.calls = 0

    def __call__(self, sample):
        self.calls += 1
        return {
            "score": self.reward * (len(sample.response_text) == self.length),
            "correct": len(sample.response_text) == self.length,
            "parts": {"calls": self.calls},
            "info": {"length": len(sample.response_text)},
        }


class TwoCalls:
    def __call__(self, sample, label):
        return 1.0


def scaled(sample, factor=1.0):
    return factor * len(sample.response_text)


def on_a_line(sample):
    response = sample.response_text
    return response["score"]


def nothing(sample):
    pass


# --- exceptions -----------------------------------------------------------------------------------


class Odd(BaseException):
    """No Exception."""


class Unprintable(Exception):
    """Raises where its text is asked for."""

    def __str__(self) -> str:
        raise KeyError("no text")


_KINDS: tuple[type[BaseException], ...] = (
    *(RecursionError, MemoryError, OverflowError, AssertionError, StopIteration),
    *(StopAsyncIteration, KeyboardInterrupt, SystemExit, asyncio.CancelledError, TimeoutError),
    *(ZeroDivisionError, KeyError, ValueError, TypeError, AttributeError, ImportError, OSError),
    *(EOFError, RuntimeError, NotImplementedError, SyntaxError, BaseException, Odd, Unprintable),
)
EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    **{kind.__name__: kind for kind in _KINDS},
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no character"),
    "half a character": lambda: ValueError("\ud800"),
    "an end": lambda: SystemExit(0),
}


def raises_what_the_response_says(sample: Sample) -> float:
    """Raise an exception by its name, or score 1."""
    if sample.response_text in EXCEPTIONS:
        raise EXCEPTIONS[sample.response_text]()
    return 1.0
