"""The collector without a service: callbacks of one loop iteration, and tasks that are given up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress

import pytest
from collector_kit import PROMPTS, Runner, at_once, counts, made_by, until

from rlcore.data.sample import Sample
from rlcore.errors import RunFailed
from rlcore.runs.rollouts import encode_samples
from rollout.collection import buffer
from rollout.collection import collector as collector_module
from rollout.collection.buffer import decode
from rollout.collection.group_runner import Group

# --- lock-step ------------------------------------------------------------------------------------


async def test_in_lock_step_a_step_is_refilled_in_whole_batches(make):
    batches = []

    class Batches(Runner):
        async def run(self, draws: Sequence[int]) -> list[Group]:
            batches.append(list(draws))
            return await super().run(draws)

    given = {"max_staleness": 0, "prompts_per_step": 4, "filters": ["user_parts:even_draws"]}
    collector, _, _ = make(Batches(), **given)
    collector.published(0)
    await asyncio.sleep(0.01)
    assert batches == [], "no step is asked for yet"
    found = await collector.collect(1)
    assert batches == [[0, 1, 2, 3], [4, 5], [6]]
    assert [group.draw for group in found.groups] == [0, 2, 4, 6]
    assert found.metrics.keys() == {"time/engine"}
    await asyncio.sleep(0.01)
    assert len(batches) == 3, "nothing is made between two steps"
    assert [group.draw for group in (await collector.collect(2)).groups] == [8, 10, 12, 14]


async def test_in_lock_step_an_interrupted_step_is_made_again_whole(make):
    async def stuck(draw: int) -> Group:
        if draw == 5:
            await asyncio.sleep(600)
        return await at_once(draw)

    given = {"max_staleness": 0, "prompts_per_step": 4, "filters": ["user_parts:even_draws"]}
    collector, queue, runner = make(Runner(stuck), **given)
    step = asyncio.create_task(collector.collect(1))
    await until(lambda: runner.started == [0, 1, 2, 3, 4, 5])
    step.cancel()
    with suppress(asyncio.CancelledError):
        await step
    assert queue.ledger.requeued() == [0, 2, 4, 5]
    runner.reply = at_once
    assert [group.draw for group in (await collector.collect(1)).groups] == [0, 2, 4, 6]


# --- what is given up -----------------------------------------------------------------------------


async def test_a_draw_that_is_given_up_before_it_has_begun_is_requeued(make):
    """In one iteration of the loop one group is started, another ends, and the last step that could
    take either takes the latter.
    """

    ends = asyncio.Event()

    async def reply(draw: int) -> Group:
        if draw == 1:
            await ends.wait()
        return await at_once(draw)

    collector, queue, runner = make(Runner(reply, free=2), oversample=2.0)
    collector.published(0)
    await until(lambda: runner.started == [0, 1])
    runner.free = 0
    await collector.collect(1)
    runner.free = 1
    collector.wake()  # begins draw 2 in the next iteration,
    ends.set()  # in which draw 1 ends,
    collected = await asyncio.create_task(collector.collect(2))  # and is taken
    assert [group.draw for group in collected.groups] == [1]
    assert runner.started == [0, 1]
    await until(lambda: queue.ledger.state(2) == "requeued")
    assert counts(queue) == {"requeued": 1, "consumed": 2}
    collector.published(1)
    runner.reply = made_by(2)
    collected = await collector.collect(3)
    assert [group.draw for group in collected.groups] == [2]
    assert collected.metrics["rollout/dropped_stale"] == 1.0


async def fails_to_close(draw: int) -> Group:
    """Fail as a workflow whose sandbox is gone."""
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        raise RunFailed(
            f"workflow sandboxed failed on draw {draw}: OSError: no such sandbox"
        ) from None
    raise AssertionError


def test_the_error_of_a_stale_group_is_only_logged(make, caplog):
    async def main() -> None:
        reply = lambda draw: at_once(draw) if draw != 3 else fails_to_close(draw)  # noqa: E731
        collector, queue, runner = make(Runner(reply), oversample=2.0)
        collector.published(0)
        await until(lambda: len(queue.ledger) == 4)
        await collector.collect(1)
        # the last step that may take any of the four
        await collector.collect(2)
        await until(lambda: queue.ledger.state(3) == "requeued")
        collector.published(2)
        runner.reply = made_by(3)
        assert [group.draw for group in (await collector.collect(3)).groups] == [2]

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert (
        "draws [3] were given up, and their task then failed: workflow sandboxed failed"
        in caplog.text
    )


async def test_a_task_that_outlives_a_halt_does_not_fail_the_next_start(make, monkeypatch):
    monkeypatch.setattr(collector_module, "CANCEL_S", 0.01)
    may_end = asyncio.Event()

    async def lingers(draw: int) -> Group:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            await may_end.wait()
            raise RunFailed("the sandbox took its time, and failed") from None
        raise AssertionError

    collector, queue, runner = make(Runner(lingers), oversample=2.0)
    collector.published(0)
    await until(lambda: len(runner.started) == 4)
    beginning = queue.beginning()
    await collector.halt()
    collector.restore(beginning, ())
    runner.reply = at_once
    may_end.set()
    await asyncio.sleep(0.01)
    assert counts(queue) == {}
    collector.published(0)
    assert [group.draw for group in (await collector.collect(1)).groups] == [0]


async def test_a_group_that_outlives_a_halt_is_ignored_after_the_next_start(make, monkeypatch):
    """A workflow ignores its cancellation, and its draw is made anew meanwhile."""

    monkeypatch.setattr(collector_module, "CANCEL_S", 0.01)
    may_end = asyncio.Event()

    async def heeds_nobody(draw: int) -> Group:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(600)
        await may_end.wait()
        return await at_once(draw)

    async def made_anew(draw: int) -> Group:
        await again.wait()
        return await at_once(draw)

    again = asyncio.Event()
    collector, queue, runner = make(Runner(heeds_nobody))
    collector.published(0)
    await until(lambda: runner.started == [0, 1])
    beginning = queue.beginning()
    await collector.halt()
    collector.restore(beginning, ())
    runner.reply = made_anew
    collector.published(0)
    await until(lambda: runner.started == [0, 1, 0, 1])
    may_end.set()
    await asyncio.sleep(0.01)
    assert queue.ledger.balance()["finished"] == 0
    again.set()
    assert [group.draw for group in (await collector.collect(1)).groups] == [0]
    assert [group.draw for group in (await collector.collect(2)).groups] == [1]


async def test_a_snapshot_tells_a_new_process_when_its_groups_were_made(make):
    """A process that is started anew knows of no publication but those of the snapshot."""

    collector, queue, _ = make(Runner(made_by(1)))
    collector.published(0)
    await until(lambda: queue.ledger.balance()["finished"] == 2)
    await collector.halt()
    state = collector.snapshot().encoded()
    again, queue, _ = make(Runner(), publications=0)
    again.restore(state, decode(state["ahead"]["groups"]))
    assert queue.ledger.balance()["finished"] == 2
    assert [group["draw"] for group in state["ahead"]["groups"]] == [0, 1]
    assert state["ahead"]["versions"]
    assert again.snapshot().encoded()["ahead"] == state["ahead"]


# --- state ----------------------------------------------------------------------------------------


async def test_a_group_is_encoded_once_however_long_it_waits(make, monkeypatch):
    encoded = []

    def encode(samples: Sequence[Sample]) -> bytes:
        encoded.extend(sample.draw for sample in samples)
        return encode_samples(samples)

    monkeypatch.setattr(buffer, "encode_samples", encode)
    collector, queue, _ = make(Runner(), max_staleness=3)
    collector.published(0)
    await until(lambda: queue.ledger.balance()["finished"] == 4)
    for step, left in ((1, [1, 2, 3]), (2, [2, 3])):
        state = (await collector.collect(step)).snapshot.encoded()
        assert [group["draw"] for group in state["ahead"]["groups"]] == left
        assert [buffered.group.draw for buffered in decode(state["ahead"]["groups"])] == left
    assert encoded == [1, 2, 3]


# --- what is counted ------------------------------------------------------------------------------


async def test_an_epoch_is_of_prompts_that_are_settled(make):
    """Groups that are in flight or finished have been in no step yet, so they do not count."""

    async def stuck_from_10(draw: int) -> Group:
        if draw >= 10:
            await asyncio.sleep(600)
        return await at_once(draw)

    given = {"max_staleness": 2, "prompts_per_step": 4, "filters": ["user_parts:even_draws"]}
    collector, queue, _ = make(Runner(stuck_from_10), **given)
    collector.published(0)
    # of the places of three steps
    await until(lambda: queue.ledger.balance()["in flight"] == 7)
    found = await collector.collect(1)
    expected = {"in flight": 7, "finished": 1, "consumed": 4, "dropped by even_draws": 5}
    assert counts(queue) == expected
    await collector.halt()
    assert found.epoch == pytest.approx(9 / PROMPTS)
