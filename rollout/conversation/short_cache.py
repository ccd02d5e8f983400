"""Keeps results for short texts, in a bounded number of bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
MAX_BYTES = 16 << 10
"""Arguments of one call that are kept; longer ones are computed each time."""


def cache_short(entries: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Cache a function of texts and bytes as `lru_cache` does, long arguments aside.

    Requests choose the texts, and the cache outlives them: without a bound of their size it would
    keep `entries` times the largest body of a request.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        cached = cast("Callable[P, T]", lru_cache(entries)(function))

        @wraps(function)
        def call(*texts: P.args, **named: P.kwargs) -> T:
            short = sum(map(sys.getsizeof, (*texts, *named.values()))) <= MAX_BYTES
            return cached(*texts, **named) if short else function(*texts, **named)

        return call

    return decorate
