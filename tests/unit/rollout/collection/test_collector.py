"""The collector without a service: callbacks of one loop iteration, and tasks that are given up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rlcore.data.prompts import PromptStream
from rlcore.data.sample import Sample, VersionSpan
from rlcore.errors import EmptyBatch, RunFailed
from rlcore.runs.rollouts import encode_samples
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection import buffer
from rollout.collection import collector as collector_module
from rollout.collection.attempts import Failure
from rollout.collection.buffer import DropCounts, Publication, PublishedVersions, decode
from rollout.collection.collector import Collector
from rollout.collection.filters import FilterChain
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


@pytest.fixture
def make(make_config) -> Callable[..., tuple[Collector, PromptQueue, Runner]]:
    """Version v is policy step v - 1."""

    def made(
        runner: Runner, publications: int = 5, **rollout: Any
    ) -> tuple[Collector, PromptQueue, Runner]:
        config = make_config(
            rollout={"max_staleness": 1, "prompts_per_step": 1, "samples_per_prompt": 1, **rollout}
        )
        queue = PromptQueue(range(PROMPTS), PromptStream(PROMPTS, seed=1))
        versions = PublishedVersions()
        for step in range(publications):
            versions.add(Publication(step + 1, step, 0))
        filters = FilterChain(config.rollout.filters, samples_per_prompt=2)
        collector = Collector(
            config, queue, runner, filters, versions, steps=100, busy_s=lambda: 0.0
        )
        return collector, queue, runner

    return made


async def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0)


# --- lock-step ------------------------------------------------------------------------------------


def test_in_lock_step_a_step_is_refilled_in_whole_batches(make):
    batches = []

    class Batches(Runner):
        async def run(self, draws: Sequence[int]) -> list[Group]:
            batches.append(list(draws))
            return await super().run(draws)

    async def main() -> None:
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

    asyncio.run(main())


def test_in_lock_step_an_interrupted_step_is_made_again_whole(make):
    async def main() -> None:
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

    asyncio.run(main())


# --- what is given up -----------------------------------------------------------------------------


def test_a_draw_that_is_given_up_before_it_has_begun_is_requeued(make):
    """In one iteration of the loop one group is started, another ends, and the last step that could
    take either takes the latter.
    """

    async def main() -> None:
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
        assert queue.ledger.balance() == {
            "in flight": 0,
            "finished": 0,
            "requeued": 1,
            "consumed": 2,
        }
        collector.published(1)
        runner.reply = made_by(2)
        collected = await collector.collect(3)
        assert [group.draw for group in collected.groups] == [2]
        assert collected.metrics["rollout/dropped_stale"] == 1.0

    asyncio.run(main())


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
        "draws [3] were given up, and what made them then failed: workflow sandboxed failed"
        in caplog.text
    )


def test_a_task_that_outlives_a_halt_does_not_fail_the_next_start(make, monkeypatch):
    async def main() -> None:
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
        assert queue.ledger.balance() == {
            "in flight": 0,
            "finished": 0,
            "requeued": 0,
            "consumed": 0,
        }
        collector.published(0)
        assert [group.draw for group in (await collector.collect(1)).groups] == [0]

    monkeypatch.setattr(collector_module, "CANCEL_S", 0.01)
    asyncio.run(main())


def test_a_group_that_outlives_a_halt_is_ignored_after_the_next_start(make, monkeypatch):
    """A workflow ignores its cancellation, and its draw is made anew meanwhile."""

    async def main() -> None:
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

    monkeypatch.setattr(collector_module, "CANCEL_S", 0.01)
    asyncio.run(main())


@pytest.mark.parametrize(("version", "kept"), [(1, 2), (2, 0), (9, 0)])
def test_a_restart_keeps_no_group_of_weights_that_it_forgets(make, version, kept):
    """Nor of those that no publication has announced yet: an engine has them a moment before."""

    async def main() -> None:
        collector, queue, _ = make(Runner(made_by(version)))
        collector.published(0)
        await until(lambda: queue.ledger.balance()["finished"] == 2)
        await collector.halt()
        collector.restore(queue.beginning(), ())
        balance = queue.ledger.balance()
        assert (balance["finished"], balance["requeued"]) == (kept, 2 - kept)

    asyncio.run(main())


def test_a_snapshot_tells_a_new_process_when_its_groups_were_made(make):
    """A process that is started anew knows of no publication but those of the snapshot."""

    async def main() -> None:
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

    asyncio.run(main())


# --- errors in callbacks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("7 was started"), RunFailed("another writes"), OSError("full")]
)
def test_a_failure_to_begin_is_raised_to_the_trainer_at_once(make, monkeypatch, error):
    def take(count: int) -> list[int]:
        raise error

    async def main() -> None:
        collector, queue, _ = make(Runner())
        monkeypatch.setattr(queue, "take", take)
        collector.published(0)
        await asyncio.wait_for(collector.collect(1), 1)

    with pytest.raises(type(error), match=str(error)):
        asyncio.run(main())


def test_a_group_whose_end_cannot_be_written_down_is_made_again(make, monkeypatch):
    async def main() -> None:
        collector, queue, _ = make(Runner())
        finish = queue.ledger.finish

        def full_disk(draw: int, outcome: str | None) -> None:
            monkeypatch.setattr(queue.ledger, "finish", finish)
            raise OSError("no space left")

        monkeypatch.setattr(queue.ledger, "finish", full_disk)
        collector.published(0)
        with pytest.raises(OSError, match="no space left"):
            await asyncio.wait_for(collector.collect(1), 1)
        for step in (1, 2):
            await asyncio.wait_for(collector.collect(step), 1)
        assert queue.ledger.balance()["consumed"] == 2

    asyncio.run(main())


def test_a_failure_to_give_a_draw_back_is_raised_to_the_trainer(make, monkeypatch):
    def give_back(draw: int, reason: str = "") -> None:
        raise RunFailed("another service writes the ledger")

    async def stuck(draw: int) -> Group:
        await asyncio.sleep(600)
        raise AssertionError

    async def main() -> None:
        collector, queue, _ = make(
            Runner(lambda draw: at_once(draw) if draw < 2 else stuck(draw)), oversample=2.0
        )
        collector.published(0)
        await collector.collect(1)
        monkeypatch.setattr(queue, "give_back", give_back)
        await collector.collect(2)  # two groups are given up
        await asyncio.wait_for(collector.collect(3), 1)

    with pytest.raises(RunFailed, match="another service writes the ledger"):
        asyncio.run(main())


# --- filters --------------------------------------------------------------------------------------


def test_a_filter_that_keeps_little_fills_the_places_of_many_steps(make):
    """More is dropped meanwhile than one step may cost, but a batch lies ready all the time."""

    async def main() -> None:
        given = {"max_staleness": 4, "prompts_per_step": 4, "filters": ["user_parts:one_in_six"]}
        collector, queue, _ = make(Runner(), **given)
        collector.published(0)
        # the trainer has taken its time
        await until(lambda: queue.ledger.balance()["finished"] == 20)
        assert queue.ledger.balance()["dropped by one_in_six"] > 16 * 4
        assert [group.draw for group in (await collector.collect(1)).groups] == [0, 6, 12, 18]

    asyncio.run(main())


def test_aborted_groups_are_not_reported_as_stale(make):
    async def aborted(draw: int) -> Group:
        return Group(draw, [sample(draw, reason="abort")])

    async def main() -> None:
        collector, _, _ = make(Runner(aborted))
        collector.published(0)
        await collector.collect(1)

    with pytest.raises(EmptyBatch) as caught:
        asyncio.run(main())
    assert (
        str(caught.value)
        == "step 1 has 0 of 1 groups after 16 draws: 16 were aborted by an engine; look for why in"
        " the logs of the engines"
    )


# --- groups that failed ---------------------------------------------------------------------------


def failure(draw: int, place: str = "a.py:3") -> Failure:
    return Failure("timeout", "mine", f"f:{draw} (draw {draw})", "too late", f" ({place} in f)")


def failing(which: Callable[[int], bool]) -> Reply:
    async def reply(draw: int) -> Group:
        if which(draw):
            return Group(draw, [], failures=[failure(draw, f"a.py:{draw % 2}")])
        return Group(draw, [sample(draw, 1)])

    return reply


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_group_that_failed_is_replaced_and_never_made_again(make, staleness):
    async def main() -> None:
        given = {"max_staleness": staleness, "prompts_per_step": 4, "max_failed": 0.5}
        collector, queue, runner = make(Runner(failing(lambda draw: draw % 3 == 1)), **given)
        collector.published(0)
        done = await collector.collect(1)
        assert [group.draw for group in done.groups] == [0, 2, 3, 5]
        failed = [one.where for one in done.drop_counts.failures]
        assert failed[:2] == ["f:1 (draw 1)", "f:4 (draw 4)"]
        assert queue.ledger.balance()["failed"] >= 2
        assert (queue.ledger.state(1), queue.ledger.requeued()) == ("failed", [])
        collector.published(1)
        done = await collector.collect(2)
        assert not {1, 4} & {group.draw for group in done.groups}
        assert runner.started.count(1) == 1
        await collector.halt()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("share", "fails", "ends"),
    [
        (0.05, {3}, ""),  # one failure of a small step
        (0.1, {3, 9}, "step 1: 2 of 10 groups failed, which is more than rollout.max_failed (0.1)"),
        (0.3, {1, 2, 3}, ""),
        (0.3, {1, 2, 3, 4}, "4 of 10 groups failed, .*the commonest failure, 2 times: workflow"),
        (0.0, {3}, "1 of 10 groups failed"),
        (1.0, set(range(9)), ""),
    ],
)
def test_the_share_of_a_step_that_may_fail(make, share, fails, ends):
    async def main() -> None:
        given = {"max_staleness": 0, "prompts_per_step": 10, "max_failed": share}
        collector, queue, _ = make(Runner(failing(fails.__contains__)), **given)
        if not ends:
            collector.published(0)
            assert len((await collector.collect(1)).groups) == 10
            return
        with pytest.raises(RunFailed, match=ends.replace("(", r"\(").replace(")", r"\)")):
            await collector.collect(1)
        assert queue.ledger.unsettled() == [], "what did not fail comes again"
        assert queue.ledger.balance()["failed"] > 0

    asyncio.run(main())


def test_where_all_may_fail_a_step_gives_up_after_many_draws(make):
    async def main() -> None:
        collector, _, _ = make(Runner(failing(lambda draw: True)), max_failed=1.0)
        collector.published(0)
        await collector.collect(1)

    with pytest.raises(EmptyBatch, match="after 16 draws: 16 failed; the commonest failure: work"):
        asyncio.run(main())


def test_the_advice_follows_from_the_reasons_of_the_drops():
    counts = DropCounts(draws=9)
    counts.dropped.update(stale=5)
    said = str(counts.too_little(3, 1, 4))
    assert said.startswith(
        "step 3 has 1 of 4 groups after 9 draws: stale dropped 5; lower rollout.oversample or"
        " raise ro"
    )
    assert "temperature" not in said
    counts.dropped.update(short=1)
    said = str(counts.too_little(3, 1, 4))
    assert "stale dropped 5, short dropped 1; use other prompts" in said
    assert "rollout.max_staleness" in said


# --- state ----------------------------------------------------------------------------------------


def test_a_group_is_encoded_once_however_long_it_waits(make, monkeypatch):
    encoded = []

    def encode(samples: Sequence[Sample]) -> bytes:
        encoded.append(samples[0].draw)
        return encode_samples(samples)

    async def main() -> None:
        collector, queue, _ = make(Runner(), max_staleness=3)
        collector.published(0)
        await until(lambda: queue.ledger.balance()["finished"] == 4)
        for step, left in ((1, [1, 2, 3]), (2, [2, 3])):
            state = (await collector.collect(step)).snapshot.encoded()
            assert [group["draw"] for group in state["ahead"]["groups"]] == left
            assert [buffered.group.draw for buffered in decode(state["ahead"]["groups"])] == left
        assert encoded == [1, 2, 3]

    monkeypatch.setattr(buffer, "encode_samples", encode)
    asyncio.run(main())


# --- what is counted ------------------------------------------------------------------------------


def test_an_epoch_is_of_prompts_that_are_settled(make):
    """Groups that are in flight or finished have been in no step yet, so they do not count."""

    async def stuck_from_10(draw: int) -> Group:
        if draw >= 10:
            await asyncio.sleep(600)
        return await at_once(draw)

    async def main() -> list[float]:
        given = {"max_staleness": 2, "prompts_per_step": 4, "filters": ["user_parts:even_draws"]}
        collector, queue, _ = make(Runner(stuck_from_10), **given)
        collector.published(0)
        # of the places of three steps
        await until(lambda: queue.ledger.balance()["in flight"] == 7)
        found = await collector.collect(1)
        expected = {
            "in flight": 7,
            "finished": 1,
            "requeued": 0,
            "consumed": 4,
            "dropped by even_draws": 5,
        }
        assert queue.ledger.balance() == expected
        await collector.halt()
        return [found.epoch]

    assert asyncio.run(main()) == [pytest.approx(9 / PROMPTS)]


def test_a_greedy_response_of_forgotten_weights_is_given_up_with_its_group(make):
    versions: dict[int, list[int]] = defaultdict(lambda: [1, 1])
    # of the sample, and of its greedy baseline
    versions[1] = [1, 2]
    versions[2] = [2, 1]

    async def reply(draw: int) -> Group:
        made, greedy = versions[draw]
        return Group(draw, [sample(draw, made)], [sample(draw, greedy, index=1)])

    async def main() -> None:
        collector, queue, _ = make(Runner(reply), max_staleness=3)
        collector.published(0)
        await until(lambda: queue.ledger.balance()["finished"] == 4)
        await collector.halt()
        collector.restore(queue.beginning(), ())
        assert queue.ledger.balance() == {
            "in flight": 0,
            "finished": 2,
            "requeued": 2,
            "consumed": 0,
        }
        assert [queue.ledger.state(draw) for draw in (1, 2)] == ["requeued", "requeued"]

    asyncio.run(main())
