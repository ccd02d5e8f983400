"""An engine without a model, for tests: deterministic tokens, and delays or failures on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.data.generation import Completion, GenerateRequest, MemoryTag, PauseMode
from rlcore.data.sample import VersionSpan
from rlcore.errors import RunFailed
from rlcore.weights import Bucket
from rollout.weight_sync.verification import FingerprintVerifier

Reply = Callable[[GenerateRequest, int], Sequence[int]]
"""(request, sample index) -> the tokens of that response."""


def random_reply(vocab_size: int) -> Reply:
    """Tokens that are a pure function of the request's address; the first stop token ends them."""

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
    """Answers each call with `reply` after `delay_s`; raises `failure` instead when there is one.
    Keeps every call.
    """

    reply: Reply
    name: str = "fake"
    delay_s: float = 0.0
    failure: Exception | None = None
    # so many calls end half-way, with finish reason "abort"
    abort_next: int = 0
    version: int = 0
    transports: tuple[str, ...] = ("copy",)
    managed: bool = True
    ended: asyncio.Future[Any] | None = None
    illness: Exception | None = None  # what a probe meets
    lives: int = 0
    released: set[MemoryTag] = field(default_factory=set)
    calls: list[list[GenerateRequest]] = field(default_factory=list)
    started: bool = False
    closed: bool = False

    async def start(self) -> None:
        self.started = True
        self.lives += 1

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        self.calls.append(list(requests))
        if self.released:
            raise RunFailed(
                f"{self.name}: was asked to generate while {sorted(self.released)} are released"
            )
        await asyncio.sleep(self.delay_s)
        if self.failure is not None:
            raise self.failure
        aborted = self.abort_next > 0
        self.abort_next = max(0, self.abort_next - 1)
        return [
            [self._complete(request, place, aborted) for place in range(request.n)]
            for request in requests
        ]

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

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def abort(self) -> None: ...

    async def begin_update(self, buckets: Sequence[Bucket]) -> None: ...

    async def receive_bucket(self, index: int, flat: Tensor | None) -> None: ...

    async def end_update(self) -> None: ...

    async def set_version(self, version: int) -> None:
        self.version = version

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Raises RunFailed for what is released already: whoever does that has lost count."""
        if self.released & set(tags):
            raise RunFailed(
                f"{self.name}: {sorted(self.released & set(tags))} are released already"
            )
        self.released |= set(tags)

    async def resume_memory(self, tags: Sequence[MemoryTag]) -> None:
        """Raises RunFailed for what is not released."""
        if set(tags) - self.released:
            raise RunFailed(f"{self.name}: {sorted(set(tags) - self.released)} are not released")
        self.released -= set(tags)

    def verifier(self) -> FingerprintVerifier:
        return FingerprintVerifier(torch.float32)

    async def checksum(self) -> str:
        return f"fake-{self.version}"

    async def health(self) -> dict[str, Any]:
        if self.illness is not None:
            raise self.illness
        return {"name": self.name, "version": self.version}

    async def kill(self) -> None:
        self.closed = True

    async def close(self) -> None:
        self.closed = True
