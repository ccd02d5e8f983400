"""The notice board of a run: a small named actor where other shells see that it goes on, and ask it to stop."""

from __future__ import annotations

import asyncio
from typing import Any


class RunStatus:
    """Written by the driver, read by `rlcore status` and `rlcore stop`."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._stops = 0
        self._asked = asyncio.Condition()

    async def write(self, facts: dict[str, Any]) -> None:
        """These facts, beside those that were written before."""
        self._facts |= facts

    async def read(self) -> dict[str, Any]:
        return self._facts

    async def stop(self) -> None:
        """Ask for a clean end after the step at hand; asked once more, the run ends at once."""
        async with self._asked:
            self._stops += 1
            self._asked.notify_all()

    async def until_stop(self, times: int) -> None:
        """Returns when the run was asked to stop so many times."""
        async with self._asked:
            await self._asked.wait_for(lambda: self._stops >= times)
