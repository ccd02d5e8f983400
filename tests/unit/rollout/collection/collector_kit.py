"""A collector without a service: groups whose replies a test writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlcore.data.sample import Sample, VersionSpan
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.group_runner import Group

PROMPTS = 20
Reply = Callable[[int], Coroutine[Any, Any, Group]]


def sample(draw: int, *versions: int, index: int = 0, reason: str = "stop") -> Sample:
    """A prompt of one token, then one token of each version."""
    m = len(versions)
    return Sample(
        draw=draw,
        index=index,
        prompt_id=f"f:{draw}",
        group_id=draw,
        rollout_id=draw,
        tokens=np.arange(1 + m, dtype=np.int32),
        loss_mask=np.array([0] + [1] * m, dtype=np.uint8),
        rollout_logprobs=np.zeros(m, np.float32),
        versions=tuple(VersionSpan(version, at, at + 1) for at, version in enumerate(versions)),
        finish_reason=reason,
    )


def made_by(version: int) -> Reply:
    async def reply(draw: int) -> Group:
        return Group(draw, [sample(draw, version)])

    return reply


at_once = made_by(1)


@dataclass
class Runner:
    """Makes each group by `reply`, and begins `free` of them."""

    reply: Reply = at_once
    free: int = 1000
    batched: bool = False
    started: list[int] = field(default_factory=list)

    async def run(self, draws: Sequence[int]) -> list[Group]:
        self.started += draws
        return [await self.reply(draw) for draw in draws]

    def room(self, samples: int) -> int:
        return self.free


def counts(queue: PromptQueue) -> dict[str, int]:
    """How many draws are in each state, of those with any."""
    return {state: count for state, count in queue.ledger.balance().items() if count}


async def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0)
