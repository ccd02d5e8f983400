"""Engines whose requests take their own time, and what a trainer asks of a service ahead of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from fake_engine import FakeEngine

from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import VersionSpan


@dataclass(eq=False)
class Continuous(FakeEngine):
    """Each request takes its own time."""

    seconds: Callable[[int], float] = lambda draw: 0.0  # by draw
    holds: Callable[[int], bool] = lambda draw: False  # back for now, by draw
    running: int = 0
    most: int = 0  # requests at one time
    draws: list[int] = field(default_factory=list)

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        self.running += len(requests)
        self.most = max(self.most, self.running)
        self.draws += [request.draw for request in requests]
        version = self.version
        try:
            await asyncio.sleep(max(self.seconds(request.draw) for request in requests))
            while any(self.holds(request.draw) for request in requests):
                await asyncio.sleep(0.002)
            if self.failure is not None:
                raise self.failure
            made = [[self._complete(r, place, False) for place in range(r.n)] for r in requests]
        finally:
            self.running -= len(requests)
        return [[crossed(one, version, self.version) for one in group] for group in made]


def crossed(made: Completion, first: int, last: int) -> Completion:
    """`made`, begun by version `first` and ended by `last`: the first token is of `first`."""
    m = len(made.tokens)
    if first == last or m < 2:
        return replace(made, versions=(VersionSpan(first, 0, m),))
    return replace(made, versions=(VersionSpan(first, 0, 1), VersionSpan(last, 1, m)))


def rollout(staleness: int, **more: object) -> dict[str, object]:
    return {"max_staleness": staleness, "engine": {"kind": "sglang"}, **more}


def publish(service, engines, step: int, version: int | None = None) -> None:
    """Publish as the trainer does, with versions that run ahead of policy steps."""
    version = 2 * step + 1 if version is None else version
    for engine in engines:
        engine.version = version
    service.published(step, version, 0)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def hold(engines, holds: Callable[[int], bool] = lambda draw: True) -> None:
    """Have engines answer no request of these draws until the next call."""
    for engine in engines:
        engine.holds = holds


def release(engines) -> None:
    hold(engines, lambda draw: False)


def draws_of(rollouts) -> list[int]:
    return sorted({sample.draw for sample in rollouts.samples})


def ages(rollouts, step: int) -> set[int]:
    """Staleness of every token, in policy steps."""
    spans = [span for sample in rollouts.samples for span in sample.versions]
    return {step - 1 - rollouts.policy_steps[span.version] for span in spans}


def train(service, engines, steps: range, *, offset: int = 0) -> tuple[list[int], set[int]]:
    """Take these steps, and publish each, as version `offset` and more; their draws and ages."""
    seen: list[int] = []
    there: set[int] = set()
    for step in steps:
        rollouts = service.next_step(step)
        there |= ages(rollouts, step)
        seen += draws_of(rollouts)
        publish(service, engines, step, version=offset + step if offset else None)
    return seen, there


def quiet(service) -> bool:
    """Whether nothing is generated, nor waits to be."""
    balance = service.ledger.balance()
    return balance["in flight"] == 0 == balance["requeued"]


def settled(consumed: int, finished: int = 0) -> dict[str, int]:
    """The balance of a ledger with nothing in flight."""
    return {"in flight": 0, "finished": finished, "requeued": 0, "consumed": consumed}
