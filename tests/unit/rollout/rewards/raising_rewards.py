"""Exceptions that graders may raise, and a reward function that raises them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlcore.data.sample import Sample


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
