"""A fleet of fake engines on an event loop of its own, with that loop's time.

A test `@pytest.mark.site("ab", retries=2)` `async def test_...(site)` runs on a fleet of two.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, random_reply
from patient_loop import LOOP_TIME, run_patiently

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.generation import Completion, GenerateRequest, SamplingParams
from rlcore.deadlines import REQUEST_S
from rollout.fleet import dispatcher, fleet, probes
from rollout.fleet.dispatcher import Dispatcher
from rollout.fleet.fleet import Fleet

LIMITS = {
    "request_timeout_s": 5.0,
    "health_every_s": 0.05,
    "health_timeout_s": 0.2,
    "start_timeout_s": 5.0,
    "restart": {"backoff_s": 0.02, "max_backoff_s": 0.05},
}


class Site:
    """Engines a, b, ... in a fleet, and what a trainer would do for them."""

    def __init__(
        self, names: Sequence[str], *, placement_timeout_s: float = 0.0, **config: Any
    ) -> None:
        self.config = EngineConfig(**{**LIMITS, **config})
        self.engines = [FakeEngine(random_reply(31), name=name) for name in names]
        self.fleet = Fleet(self.engines, self.config, placement_timeout_s=placement_timeout_s)
        limit_s = self.config.request_timeout_s or REQUEST_S
        self.dispatcher = Dispatcher(self.fleet, self.config, vocab_size=31, limit_s=limit_s)

    async def one(self, draw: int, **request: int) -> list[Completion]:
        """The answer of an engine to a request."""
        return await self.dispatcher.one(ask(draw, **request))

    async def publish(self, version: int = 1, *, only_stale: bool = False) -> None:
        engines = await (self.fleet.stale() if only_stale else self.fleet.candidates())
        for engine in engines:
            self.fleet.draining(engine)
        for engine in engines:
            await engine.set_version(version)
            self.fleet.published(engine, version)

    async def catch_up_forever(self, version: int = 1) -> None:
        while True:
            await self.fleet.wait_for_stale()
            await self.publish(version, only_stale=True)

    def states(self) -> str:
        return " ".join(str(member.health.state) for member in self.fleet.members)

    async def until(self, states: str, seconds: float = 5.0) -> None:
        async def reached() -> None:
            while self.states() != states:
                await asyncio.sleep(0.005)

        await asyncio.wait_for(reached(), seconds)


def ask(draw: int, n: int = 1, turn: int = 0) -> GenerateRequest:
    return GenerateRequest(
        np.array([1, 2], dtype=np.int32), SamplingParams(max_new_tokens=4), draw, n, turn=turn
    )


Use = Callable[[Site], Awaitable[None]]


@pytest.fixture
def on_site(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`on_site("ab", use, retries=2)`: start a fleet of two, publish version 1, `await use(site)`,
    close it. Time passes while all of them wait.
    """
    monkeypatch.setattr(fleet, "time", LOOP_TIME)
    monkeypatch.setattr(probes, "time", LOOP_TIME)
    monkeypatch.setattr(dispatcher, "now", LOOP_TIME.monotonic)

    def run(
        names: Sequence[str], use: Use, *, publish: bool = True, again: bool = False, **config: Any
    ) -> None:
        async def main() -> None:
            site = Site(names, **config)
            await site.fleet.start(again=again)
            if publish:
                await site.publish()
            try:
                await use(site)
            finally:
                await site.fleet.close()

        run_patiently(asyncio.wait_for(main(), 60))

    return run


@pytest.fixture
def site(request: pytest.FixtureRequest, on_site: Callable[..., None]) -> Callable[[Use], None]:
    """`on_site` with the arguments of the test's mark; the test itself gets the `Site`."""
    mark = request.node.get_closest_marker("site")
    return partial(on_site, *mark.args, **mark.kwargs)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "site(names, **config): the fleet of an async test")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    given.pop("site")(partial(pyfuncitem.obj, **given))
    return True


@pytest.fixture
def request_of() -> Callable[..., GenerateRequest]:
    """`request_of(draw, n=1, turn=0)`."""
    return ask
