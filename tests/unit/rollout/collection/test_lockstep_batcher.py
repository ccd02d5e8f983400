"""The lock-step batcher: whole batches, in the order of the draws, whichever came first."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlcore.data.generation import GenerateRequest, SamplingParams
from rollout.fleet.dispatcher import LockstepBatcher

SAMPLING = SamplingParams(max_new_tokens=1)


def request(draw: int, turn: int = 0, first_sample: int = 0) -> GenerateRequest:
    return GenerateRequest(
        np.zeros(1, np.int32), SAMPLING, draw, turn=turn, first_sample=first_sample
    )


class Recorder:
    """Answer each request with its own address."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, int, int]]] = []

    async def __call__(self, requests):
        addresses = [(r.draw, r.turn, r.first_sample) for r in requests]
        self.batches.append(addresses)
        await asyncio.sleep(0.001)
        return [[address] for address in addresses]


async def conversation(batcher, generate, draw, turns, delay=0.0):
    """`turns` calls one after the other, with a pause before each; checks that each answer is its
    own.
    """
    try:
        for turn in range(turns):
            await asyncio.sleep(delay)
            assert await generate(request(draw, turn)) == [(draw, turn, 0)]
    finally:
        batcher.leave(draw)


async def run(flush, jobs):
    batcher = LockstepBatcher(flush)
    generators = {draw: batcher.enter(draw) for draw, *_ in jobs}
    await asyncio.wait_for(
        asyncio.gather(*(conversation(batcher, generators[d], d, *rest) for d, *rest in jobs)), 10
    )


@pytest.mark.parametrize("delays", [(0.0, 0.0, 0.0), (0.03, 0.0, 0.01), (0.0, 0.02, 0.04)])
async def test_batches_do_not_depend_on_arrival(delays):
    flush = Recorder()
    await run(flush, [(5, 2, delays[0]), (3, 1, delays[1]), (4, 3, delays[2])])
    assert flush.batches == [[(3, 0, 0), (4, 0, 0), (5, 0, 0)], [(4, 1, 0), (5, 1, 0)], [(4, 2, 0)]]


async def test_parallel_calls_of_one_workflow_are_one_batch():
    flush = Recorder()
    batcher = LockstepBatcher(flush)
    one = batcher.enter(1)
    two = batcher.enter(2)
    calls = two(request(2)), one(request(1, first_sample=1)), one(request(1, first_sample=0))
    answers = await asyncio.wait_for(asyncio.gather(*calls), 10)
    assert flush.batches == [[(1, 0, 0), (1, 0, 1), (2, 0, 0)]]
    assert answers == [[(2, 0, 0)], [(1, 0, 1)], [(1, 0, 0)]]


async def test_a_workflow_that_leaves_without_a_call_delays_no_batch():
    flush = Recorder()
    batcher = LockstepBatcher(flush)
    one = batcher.enter(1)
    _ = batcher.enter(2)
    call = asyncio.ensure_future(one(request(1)))
    await asyncio.sleep(0.01)
    assert flush.batches == []
    batcher.leave(2)
    assert await asyncio.wait_for(call, 10) == [(1, 0, 0)]


async def test_calls_that_are_taken_back_are_in_no_batch():
    """A try that failed has left some behind; the next one of the same workflow is waited for."""
    flush = Recorder()
    batcher = LockstepBatcher(flush)
    one = batcher.enter(1)
    two = batcher.enter(2)
    left_behind = asyncio.ensure_future(one(request(1, first_sample=7)))
    await asyncio.sleep(0)
    batcher.withdraw(1)
    other = asyncio.ensure_future(two(request(2)))
    await asyncio.sleep(0.01)
    assert left_behind.cancelled()
    assert flush.batches == []
    assert await asyncio.wait_for(one(request(1)), 10) == [(1, 0, 0)]
    await other
    batcher.leave(1)
    batcher.leave(1)
    assert flush.batches == [[(1, 0, 0), (2, 0, 0)]]


async def test_a_failing_engine_fails_all_waiting_calls():
    async def flush(requests):
        raise RuntimeError("engine is gone")

    batcher = LockstepBatcher(flush)
    calls = [batcher.enter(draw)(request(draw)) for draw in (1, 2)]
    found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
    assert [str(error) for error in found] == ["engine is gone"] * 2
