"""The pause gate: which calls reach an SGLang engine, and when none is in flight."""

from __future__ import annotations

import asyncio

from rollout.engines.sglang.pause_gate import PauseGate


async def test_a_call_that_waited_is_not_let_through_when_it_is_closed_again_at_once() -> None:
    gate = PauseGate()
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
