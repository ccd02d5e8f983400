"""An engine without a model, for tests: deterministic tokens, and delays or failures on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from rlcore.data.generation import Completion, GenerateRequest, MemoryTag, PauseMode
from rlcore.data.sample import VersionSpan
from rlcore.errors import RunFailed
from rlcore.weights import Bucket

Reply = Callable[[GenerateRequest, int], Sequence[int]]
"""(request, sample index) -> the tokens of that response."""


def random_reply(vocab_size: int) -> Reply:
    """A reply of tokens that depend on the request's address alone, up to the first stop token."""

    def reply(request: GenerateRequest, sample: int) -> list[int]:
        address = [request.seed, request.draw, sample, request.turn]
        tokens = (
            np.random.default_rng(address)
            .integers(0, vocab_size, request.sampling.max_new_tokens)
            .tolist()
        )
        stops = [i for i, token in enumerate(tokens) if token in request.sampling.stop_token_ids]
        return tokens[: stops[0] + 1] if stops else tokens

    return reply


@dataclass(eq=False)
class FakeEngine:
    """Answers each call with `reply` after `delay_s`, or raises `failure`; records every call."""

    reply: Reply
    name: str = "fake"
    delay_s: float = 0.0
    failure: Exception | None = None
    # the number of calls that end half-way, with finish reason "abort"
    abort_next: int = 0
    version: int = 0
    transports: tuple[str, ...] = ("copy",)
    managed: bool = True
    ended: asyncio.Future[Any] | None = None
    probe_error: Exception | None = None  # raised by `health`
    tokens_made: int | None = 0  # what `progress` returns
    deaf: bool = False  # it ignores `abort`
    held: bool = False  # it answers no call as long as this is set
    aborted: list[str] = field(default_factory=list)  # the ids that `abort` was given
    starts: int = 0
    released: set[MemoryTag] = field(default_factory=set)
    calls: list[list[GenerateRequest]] = field(default_factory=list)
    started: bool = False
    closed: bool = False

    async def start(self) -> None:
        """See `RolloutEngine.start`."""
        self.started = True
        self.starts += 1

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """See `RolloutEngine.generate`."""
        self.calls.append(list(requests))
        if self.released:
            raise RunFailed(
                f"{self.name}: was asked to generate while {sorted(self.released)} are released"
            )
        ended = await self._wait([request.rid for request in requests])
        if self.failure is not None:
            raise self.failure
        aborted = ended or self.abort_next > 0
        self.abort_next = max(0, self.abort_next - 1)
        return [
            [self._complete(request, place, aborted) for place in range(request.n)]
            for request in requests
        ]

    async def _wait(self, rids: Sequence[str]) -> bool:
        """Wait for `delay_s`, and while it is held, or for an abort; whether that came."""
        until = asyncio.get_running_loop().time() + self.delay_s
        await asyncio.sleep(0)
        while (left := until - asyncio.get_running_loop().time()) > 0:
            if not self.deaf and not set(rids).isdisjoint(self.aborted):
                return True
            await asyncio.sleep(min(left, 0.01))
        while self.held:
            await asyncio.sleep(0.002)
        return False

    def _complete(self, request: GenerateRequest, place: int, aborted: bool) -> Completion:
        reply = self.reply(request, request.samples[place])
        tokens = np.array(reply[len(request.made(place)) :], dtype=np.int32)
        if aborted:
            tokens = tokens[: len(tokens) // 2]
        stopped = len(tokens) > 0 and int(tokens[-1]) in request.sampling.stop_token_ids
        spans = (VersionSpan(self.version, 0, len(tokens)),) if len(tokens) else ()
        return Completion(
            tokens=tokens,
            logprobs=np.full(len(tokens), -1.0, dtype=np.float32),
            finish_reason="abort" if aborted else "stop" if stopped else "length",
            versions=spans,
        )

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`."""
        self.aborted += rids or []

    async def progress(self) -> int | None:
        """See `RolloutEngine.progress`."""
        return self.tokens_made

    async def begin_update(self, buckets: Sequence[Bucket]) -> None:
        """See `RolloutEngine.begin_update`."""

    async def receive_bucket(self, index: int, flat: Tensor | None) -> None:
        """See `RolloutEngine.receive_bucket`."""

    async def end_update(self) -> None:
        """See `RolloutEngine.end_update`."""

    async def set_version(self, version: int) -> None:
        """See `RolloutEngine.set_version`."""
        self.version = version

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Raise RunFailed for a tag that is released already: the caller has lost count."""
        if self.released & set(tags):
            raise RunFailed(
                f"{self.name}: {sorted(self.released & set(tags))} are released already"
            )
        self.released |= set(tags)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Raise RunFailed for a tag that is not released."""
        if set(tags) - self.released:
            raise RunFailed(f"{self.name}: {sorted(set(tags) - self.released)} are not released")
        self.released -= set(tags)

    async def health(self) -> dict[str, Any]:
        """See `RolloutEngine.health`."""
        if self.probe_error is not None:
            raise self.probe_error
        return {"name": self.name, "version": self.version}

    async def kill(self) -> None:
        """See `RolloutEngine.kill`."""
        self.closed = True

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        self.closed = True


def addresses(rollouts) -> list[tuple[int, int, str, tuple[int, ...]]]:
    """Where each sample of a step comes from, and its tokens."""
    return [(s.draw, s.index, s.prompt_id, tuple(s.tokens.tolist())) for s in rollouts.samples]
