"""Whole batches, for an engine whose results depend on how it batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence

from rlcore.data.generation import Completion, Generate, GenerateRequest

Flush = Callable[[Sequence[GenerateRequest]], Awaitable[list[list[Completion]]]]
WaitingCall = tuple[GenerateRequest, "asyncio.Future[list[Completion]]"]


class LockstepBatcher:
    """Passes on the generate calls of concurrent workflows as one batch, once each of them waits.

    The batch is sorted by address (draw, turn, first sample; equal ones by which workflow entered
    first), so it never depends on which call arrived first, and a resumed run sees the same
    batches. The price: in each round all workflows wait for the slowest.
    """

    def __init__(self, flush: Flush) -> None:
        self._flush = flush
        # workflow that has entered and not left -> its calls that wait
        self._workflows: dict[Hashable, list[WaitingCall]] = {}
        self._running: asyncio.Task[None] | None = None

    def enter(self, key: Hashable) -> Generate:
        """The `generate` of workflow `key`. All must have entered before the first runs."""
        if key in self._workflows:
            raise ValueError(f"{key} has entered already")
        self._workflows[key] = []

        async def generate(request: GenerateRequest) -> list[Completion]:
            future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
            self._workflows[key].append((request, future))
            self._recheck()
            return await future

        return generate

    def withdraw(self, key: Hashable) -> None:
        """Take back the calls of workflow `key` that wait; it may make others."""
        calls = self._workflows.get(key, [])
        for _, future in calls:
            future.cancel()
        calls.clear()

    def leave(self, key: Hashable) -> None:
        """Workflow `key` has ended, so no batch waits for it any more. May be called twice."""
        self.withdraw(key)
        if self._workflows.pop(key, None) is not None:
            self._recheck()

    def busy(self) -> list[Hashable]:
        """Workflows that wait for no generation."""
        return [key for key, calls in self._workflows.items() if not calls]

    def _recheck(self) -> None:
        # Deferred by one iteration of the loop: calls that one workflow makes side by side belong
        # to one batch.
        asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        if self._running is not None or not self._workflows or self.busy():
            return
        batch = [call for calls in self._workflows.values() for call in calls]
        for calls in self._workflows.values():
            calls.clear()
        batch.sort(key=lambda call: (call[0].draw, call[0].turn, call[0].first_sample))
        self._running = asyncio.get_running_loop().create_task(self._serve(batch))

    async def _serve(self, batch: list[WaitingCall]) -> None:
        try:
            results = await self._flush([request for request, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the error belongs to the calls that wait
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
