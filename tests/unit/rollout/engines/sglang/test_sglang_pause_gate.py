"""The pause gate: which calls reach an SGLang engine, and when none is in flight."""

from __future__ import annotations

import asyncio
import time

import pytest

from rlcore.errors import EngineHangs
from rollout.engines.sglang.pause_gate import PauseGate


def test_a_call_that_waited_is_not_let_through_when_it_is_closed_again_at_once() -> None:
    async def use() -> None:
        gate = PauseGate("engine-0", timeout_s=5.0)
        seen: list[int] = []

        async def call() -> None:
            async with gate:
                seen.append(gate.inside)

        gate.close()
        waiting = asyncio.ensure_future(call())
        await asyncio.sleep(0.01)
        gate.open()
        gate.close()
        await gate.emptied()
        await asyncio.sleep(0.01)
        assert seen == [], "a pause that found no call in flight must find none later"
        gate.open()
        await waiting
        assert seen == [1]

    asyncio.run(use())


def test_both_sides_wait_no_longer_than_the_limit() -> None:
    async def use() -> None:
        gate = PauseGate("engine-0", timeout_s=0.1)
        async with gate:
            with pytest.raises(
                EngineHangs, match=r"engine-0 still had 1 requests in flight after 0\.1 s"
            ):
                await gate.emptied()
            gate.close()
            began = time.monotonic()
            with pytest.raises(
                EngineHangs, match=r"engine-0 was paused and not resumed after 0\.1 s"
            ):
                async with gate:
                    pass
            assert time.monotonic() - began < 2
        assert gate.inside == 0
        await gate.emptied()

    asyncio.run(use())
