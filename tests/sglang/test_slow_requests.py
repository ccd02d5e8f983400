"""A real server that is slow, and one that hangs, as the fleet sees them by their progress."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_kit import Served, appeared, serving

from rlcore.config.sections.rollout import EngineConfig, RestartConfig
from rlcore.data.generation import Completion, GenerateRequest, SamplingParams
from rlcore.errors import RlcoreError
from rollout.engines.checks import folder_vocab_size
from rollout.engines.sglang.answers import version_name
from rollout.engines.sglang.engine import MARK, SGLangEngine
from rollout.fleet.dispatcher import Dispatcher
from rollout.fleet.fleet import Fleet

PROBES = {
    "health_every_s": 0.1,
    "health_timeout_s": 60.0,
    "retries": 0,
    "restart": RestartConfig(limit=0),
}
Use = Callable[[Dispatcher, SGLangEngine], Awaitable[Any]]


def request(draw: int, length: int, n: int = 1) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=length)
    return GenerateRequest(np.array([3, 4, 5], dtype=np.int32), sampling, draw, n)


def with_fleet(served: Served, use: Use, *, limit_s: float = 600.0, **limits: float) -> Any:
    """Await `use(dispatcher, engine)` on a fleet of the session's server, in service."""

    async def main() -> Any:
        config = served.config.model_copy(update={"urls": [served.url], **PROBES, **limits})
        engine = SGLangEngine(
            served.external(), config=config, keys=served.keys, model_path=str(served.model)
        )
        fleet = Fleet([engine], config)
        await fleet.start()
        # the weights that it started with do, as nothing looks at the tokens
        fleet.draining(engine)
        engine.weights.begin(())
        engine.weights.end()
        engine.weights.set_version(1)
        version = {"new_version": version_name(1, MARK), "abort_all_requests": False}
        await engine._control("/update_weight_version", version)
        fleet.published(engine, 1)
        try:
            vocab_size = folder_vocab_size(str(served.model))
            dispatcher = Dispatcher(fleet, config, vocab_size=vocab_size, limit_s=limit_s)
            return await use(dispatcher, engine)
        finally:
            await fleet.close()
            await engine.close()

    return served.call(main(), 240)


async def started(
    served: Served, dispatcher: Dispatcher, slow: GenerateRequest
) -> asyncio.Future[list[Completion]]:
    """Send a request; return its call when each of its samples has about 20 tokens."""
    return await served.started(lambda: asyncio.ensure_future(dispatcher.one(slow)), 20 * slow.n)


def lengths(completions: list[Completion]) -> list[int]:
    return [len(completion.tokens) for completion in completions]


def longest(engine: SGLangEngine) -> int:
    assert engine._generation is not None
    return engine._generation.limits.total_tokens - 3


@pytest.fixture(scope="module")
def seconds(served: Served) -> float:
    """How long the longest responses take."""

    async def use(dispatcher: Dispatcher, engine: SGLangEngine) -> float:
        began = time.monotonic()
        await dispatcher.one(request(1, longest(engine), n=16))
        return time.monotonic() - began

    return float(with_fleet(served, use))


def test_a_server_that_makes_tokens_is_left_alone(served: Served, seconds: float) -> None:
    """Its first answer comes later than the limit."""

    async def use(dispatcher: Dispatcher, engine: SGLangEngine) -> list[Completion]:
        made = await dispatcher.one(request(2, longest(engine), n=16))
        assert dispatcher.fleet.serving == 1
        assert dispatcher.retried == 0
        assert lengths(made) == [longest(engine)] * 16
        return made

    # a server that stands still for a second, on a busy machine, makes tokens too
    with_fleet(served, use, progress_timeout_s=max(seconds / 4, min(2.0, seconds / 2)))


def test_a_scheduler_that_builds_a_kernel_is_left_alone(served: Served) -> None:
    """It answers no probe for longer than ten seconds, at its first batch with top-p, say."""

    async def use(dispatcher: Dispatcher, engine: SGLangEngine) -> None:
        scheduler = appeared(served.server.pid, "sglang::scheduler")
        whole = longest(engine)
        slow = await started(served, dispatcher, request(5, whole, n=16))
        os.kill(scheduler, signal.SIGSTOP)
        try:
            await asyncio.sleep(12)
        finally:
            os.kill(scheduler, signal.SIGCONT)
        assert lengths(await slow) == [whole] * 16
        assert (dispatcher.retried, dispatcher.fleet.serving) == (0, 1)

    with_fleet(served, use, health_timeout_s=EngineConfig().health_timeout_s)


@pytest.mark.full
@pytest.mark.parametrize(("given", "lives"), [({}, True), ({"watchdog_timeout": 3}, False)])
def test_a_pause_that_holds_a_batch_is_not_taken_for_a_hang(
    served: Served, tmp_path: Path, given: dict[str, float], lives: bool
) -> None:
    """By SGLang's watchdog, which ends the server; `in_place` leaves a batch where it is."""
    with serving(served.model, tmp_path / "paused.log", server=given) as paused:

        async def use(dispatcher: Dispatcher, engine: SGLangEngine) -> None:
            whole = longest(engine)
            slow = await started(paused, dispatcher, request(6, whole, n=16))
            await engine.pause("in_place")
            await asyncio.sleep(12)
            if lives:
                await engine.resume()
                assert lengths(await slow) == [whole] * 16
            else:
                with pytest.raises(RlcoreError):
                    await slow

        with_fleet(paused, use)


def test_a_request_whose_time_is_up_keeps_its_tokens_and_its_server(
    served: Served, seconds: float
) -> None:
    """The scheduler is stopped when every sample has tokens, and until the time is up."""

    async def use(dispatcher: Dispatcher, engine: SGLangEngine) -> None:
        scheduler = appeared(served.server.pid, "sglang::scheduler")
        whole = longest(engine)
        slow = await started(served, dispatcher, request(3, whole, n=16))
        os.kill(scheduler, signal.SIGSTOP)
        try:
            quick = asyncio.ensure_future(engine.generate([request(4, whole // 2)]))
            while not dispatcher.overdue:
                await asyncio.sleep(0.05)
        finally:
            os.kill(scheduler, signal.SIGCONT)
        other = await quick
        cut = await slow
        assert {completion.finish_reason for completion in cut} == {"abort"}
        assert all(0 < length < whole for length in lengths(cut))
        assert lengths(other[0]) == [whole // 2]
        assert (dispatcher.overdue, dispatcher.retried, dispatcher.fleet.serving) == (1, 0, 1)

    with_fleet(served, use, limit_s=max(seconds / 2, 5.0))


def test_answers_that_do_not_come_are_missed(served: Served) -> None:
    """The detokenizer hangs. The scheduler, which probes ask, is well and has nothing to do."""

    async def use(dispatcher: Dispatcher, engine: SGLangEngine) -> None:
        detokenizer = appeared(served.server.pid, "sglang::detokenizer")
        os.kill(detokenizer, signal.SIGSTOP)
        call = asyncio.ensure_future(dispatcher.one(request(5, 20)))
        try:
            while dispatcher.fleet.serving:
                await asyncio.sleep(0.05)
            why = dispatcher.fleet.members[0].health.why
            assert "has 1 requests and made no token for 2 s" in why
        finally:
            os.kill(detokenizer, signal.SIGCONT)
            call.cancel()
            await asyncio.wait({call})

    with_fleet(served, use, progress_timeout_s=2.0)
