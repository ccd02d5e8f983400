"""Which engine answers which request, under `rollout.engine.request_timeout_s`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rlcore.errors import RlcoreError, RunFailed
from rlcore.protocols import Completion, GenerateRequest, RolloutEngine
from rollout.deadlines import together, within


class Dispatcher:
    """Spreads requests over the engines and watches each call."""

    def __init__(self, engines: Sequence[RolloutEngine], *, timeout_s: float, max_batch: int) -> None:
        self.engines, self.timeout_s, self.max_batch = list(engines), timeout_s, max_batch
        self._outstanding = [0] * len(self.engines)     # requests
        self._busy_since = 0.0
        self.busy_s = 0.0                               # seconds in which any engine had work

    async def one(self, request: GenerateRequest) -> list[Completion]:
        """To the engine with the fewest requests: for engines that batch continuously."""
        engine = min(range(len(self.engines)), key=lambda e: (self._outstanding[e], e))
        return (await self._call(engine, [request]))[0]

    async def batch(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """Request i to engine i mod n, in calls of at most `max_batch` sequences: the same batches for the same requests."""
        shares = [list(range(e, len(requests), len(self.engines))) for e in range(len(self.engines))]
        results: list[list[Completion]] = [[] for _ in requests]

        async def serve(engine: int) -> None:
            for part in self._cut(shares[engine], requests):
                answers = await self._call(engine, [requests[i] for i in part])
                for i, completions in zip(part, answers):
                    results[i] = completions

        await together(*(serve(e) for e in range(len(self.engines)) if shares[e]))
        return results

    def _cut(self, share: Sequence[int], requests: Sequence[GenerateRequest]) -> Iterator[list[int]]:
        part: list[int] = []
        size = 0
        for i in share:
            if part and size + requests[i].n > self.max_batch:
                yield part
                part, size = [], 0
            part.append(i)
            size += requests[i].n
        yield part

    async def _call(self, engine: int, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        client = self.engines[engine]
        with self._counted(engine, len(requests)):
            try:
                answers = await within(
                    self.timeout_s,
                    client.generate(requests),
                    lambda: f"engine {client.name} did not answer {len(requests)} requests (the first: {requests[0].rid}) "
                    f"within {self.timeout_s:g} s (rollout.engine.request_timeout_s)",
                )
            except RlcoreError:
                raise
            except Exception as error:
                raise RunFailed(f"engine {client.name} failed: {type(error).__name__}: {error}") from error
        if [len(a) for a in answers] != [r.n for r in requests]:
            raise RunFailed(
                f"engine {client.name} gave {[len(a) for a in answers]} completions, asked were {[r.n for r in requests]}"
            )
        return answers

    @contextmanager
    def _counted(self, engine: int, requests: int) -> Iterator[None]:
        if not any(self._outstanding):
            self._busy_since = time.perf_counter()
        self._outstanding[engine] += requests
        try:
            yield
        finally:
            self._outstanding[engine] -= requests
            if not any(self._outstanding):
                self.busy_s += time.perf_counter() - self._busy_since

    def waiting_for(self) -> str:
        """"engine a (3 requests), engine b (1 request)", or "" when none has work."""
        busy = ((client.name, n) for client, n in zip(self.engines, self._outstanding) if n)
        return ", ".join(f"engine {name} ({n} request{'s' * (n != 1)})" for name, n in busy)
