"""Calls of buckets have their turns, whatever order they come in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from rollout.engines.bucket_turns import BucketTurns, OutOfTurn


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


async def take(turns: BucketTurns, index: int, taken: list[Any]) -> None:
    async with turns.take(index):
        taken.append(f"{index} begins")
        await asyncio.sleep(0)
        taken.append(f"{index} ends")


def test_buckets_are_taken_in_their_order_and_one_at_a_time() -> None:
    async def use() -> None:
        turns = BucketTurns()
        for _ in range(2):  # of the second update too
            taken: list[str] = []
            turns.begin()
            await asyncio.gather(*(take(turns, index, taken) for index in (2, 0, 3, 1)))
            assert taken == [f"{index} {what}" for index in range(4) for what in ("begins", "ends")]
        await take(turns, 1, taken)  # once more, without a new update
        assert taken[-1] == "1 ends"

    run(use())


@pytest.mark.parametrize("raises", [True, False])
def test_after_a_bucket_that_was_not_taken_no_other_is(raises: bool) -> None:
    async def fail(turns: BucketTurns) -> None:
        async with turns.take(0) as update:
            if raises:
                raise ValueError("no memory")
            update.failed = 0

    async def use() -> None:
        turns = BucketTurns()
        taken: list[str] = []
        waits = asyncio.ensure_future(take(turns, 1, taken))
        await asyncio.sleep(0)
        failing = asyncio.ensure_future(fail(turns))
        with pytest.raises(OutOfTurn, match=r"^bucket 1 cannot be taken: bucket 0 was not$"):
            await waits
        with pytest.raises(OutOfTurn, match=r"^bucket 2 cannot be taken: bucket 0 was not$"):
            await take(turns, 2, taken)
        assert isinstance(failing.exception(), ValueError) is raises
        turns.begin()
        await take(turns, 0, taken)
        assert taken == ["0 begins", "0 ends"]

    run(use())


def test_a_call_of_an_update_that_was_given_up_is_refused_and_harms_nothing() -> None:
    async def use() -> None:
        turns = BucketTurns()
        taken: list[str] = []
        late = asyncio.ensure_future(take(turns, 1, taken))
        await asyncio.sleep(0)
        async with turns.take(0):  # still receives
            turns.begin()
            first = asyncio.ensure_future(take(turns, 0, taken))
            with pytest.raises(OutOfTurn, match=r"^bucket 1 belongs to a cancelled update$"):
                await late
            assert taken == []
        await first
        assert taken == ["0 begins", "0 ends"]

    run(use())


def test_a_turn_is_not_waited_for_without_a_limit() -> None:
    async def use() -> None:
        with pytest.raises(OutOfTurn, match=r"^bucket 2 waited 0\.05 s for bucket 0"):
            await take(BucketTurns(0.05), 2, [])

    run(use())
