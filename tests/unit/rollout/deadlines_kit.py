"""Deadlines that come when their reason is there, not after a time."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

from rollout.asyncio_utils import within


def once_it_says(pattern: str) -> Callable[..., Any]:
    """A `within` whose time is up when its message has `pattern`: a busy machine may need long
    until then.
    """

    async def waiting(seconds: float, work: Awaitable[Any], describe: Callable[[], str]) -> Any:
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and re.search(pattern, describe()) is None:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            task.cancel()
            raise
        return await within(0.0, task, describe)

    return waiting
