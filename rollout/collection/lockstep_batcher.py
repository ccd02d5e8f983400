"""Whole batches for an engine whose results depend on how it batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence

from rlcore.data.generation import Completion, Generate, GenerateRequest

Flush = Callable[[Sequence[GenerateRequest]], Awaitable[list[list[Completion]]]]
Waiting = tuple[GenerateRequest, "asyncio.Future[list[Completion]]"]


class LockstepBatcher:
    """Holds the generate calls of concurrent workflows until each live one waits, then passes them
    on as one batch.

    The batch is sorted by address (draw, turn, first sample; equal ones by who entered first), so
    that it never depends on who arrived first; a run that is resumed therefore sees the same
    batches. The price: in each round everybody waits for the slowest workflow.
    """

    def __init__(self, flush: Flush) -> None:
        self._flush = flush
        self._members: dict[Hashable, list[Waiting]] = {}  # live workflow -> its calls that wait
        self._running: asyncio.Task[None] | None = None

    def enter(self, member: Hashable) -> Generate:
        """Count `member` as live and return its `generate`. Enter all before the first one runs."""
        if member in self._members:
            raise ValueError(f"{member} has entered already")
        self._members[member] = []

        async def generate(request: GenerateRequest) -> list[Completion]:
            future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
            self._members[member].append((request, future))
            self._recheck()
            return await future

        return generate

    def leave(self, member: Hashable) -> None:
        """`member` finished or failed: nobody waits for it any more."""
        for _, future in self._members.pop(member):
            future.cancel()
        self._recheck()

    def busy(self) -> list[Hashable]:
        """Live members that wait for no generation."""
        return [member for member, waiting in self._members.items() if not waiting]

    def _recheck(self) -> None:
        # Deferred by one turn of the loop: calls that one workflow makes side by side belong to one
        # batch.
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        if self._running is not None or not self._members or self.busy():
            return
        batch = [waiting for calls in self._members.values() for waiting in calls]
        for calls in self._members.values():
            calls.clear()
        batch.sort(key=lambda waiting: (waiting[0].draw, waiting[0].turn, waiting[0].first_sample))
        self._running = asyncio.get_running_loop().create_task(self._serve(batch))

    async def _serve(self, batch: list[Waiting]) -> None:
        try:
            results = await self._flush([request for request, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - whatever went wrong belongs to those who wait
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
        else:
            for (_, future), completions in zip(batch, results, strict=True):
                if not future.done():
                    future.set_result(completions)
        finally:
            self._running = None
        self._recheck()

    async def close(self) -> None:
        """Stop the batch that is running, if any."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running})
