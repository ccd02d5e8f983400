"""Groups that fail, errors in callbacks, and filters that keep little."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import pytest
from collector_kit import Reply, Runner, at_once, sample, until

from rlcore.errors import EmptyBatch, RunFailed, TooManyFailed
from rollout.collection.buffer import DropCounts
from rollout.collection.group_runner import Group
from rollout.failures import Failure
from rollout.rewards.scorer import FailureCounts

# --- errors in callbacks ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("7 was started"), RunFailed("another writes"), OSError("full")]
)
async def test_a_failure_to_begin_is_raised_to_the_trainer_at_once(make, monkeypatch, error):
    def take(count: int) -> list[int]:
        raise error

    collector, queue, _ = make(Runner())
    monkeypatch.setattr(queue, "take", take)
    collector.published(0)
    with pytest.raises(type(error), match=str(error)):
        await asyncio.wait_for(collector.collect(1), 60)


async def test_a_group_whose_end_cannot_be_written_down_is_made_again(make, monkeypatch):
    collector, queue, _ = make(Runner())
    finish = queue.ledger.finish

    def full_disk(draw: int, outcome: str | None) -> None:
        monkeypatch.setattr(queue.ledger, "finish", finish)
        raise OSError("no space left")

    monkeypatch.setattr(queue.ledger, "finish", full_disk)
    collector.published(0)
    with pytest.raises(OSError, match="no space left"):
        await asyncio.wait_for(collector.collect(1), 60)
    for step in (1, 2):
        await asyncio.wait_for(collector.collect(step), 60)
    assert queue.ledger.balance()["consumed"] == 2


async def test_a_failure_to_give_a_draw_back_is_raised_to_the_trainer(make, monkeypatch):
    def give_back(draw: int, reason: str = "") -> None:
        raise RunFailed("another service writes the ledger")

    async def stuck(draw: int) -> Group:
        await asyncio.sleep(600)
        raise AssertionError

    collector, queue, _ = make(
        Runner(lambda draw: at_once(draw) if draw < 2 else stuck(draw)), oversample=2.0
    )
    collector.published(0)
    await collector.collect(1)
    monkeypatch.setattr(queue, "give_back", give_back)
    await collector.collect(2)  # two groups are given up
    with pytest.raises(RunFailed, match="another service writes the ledger"):
        await asyncio.wait_for(collector.collect(3), 60)


# --- filters --------------------------------------------------------------------------------------


async def test_a_filter_that_keeps_little_fills_the_places_of_many_steps(make):
    """More is dropped meanwhile than one step may cost, but a batch lies ready all the time."""
    given = {"max_staleness": 4, "prompts_per_step": 4, "filters": ["user_parts:one_in_six"]}
    collector, queue, _ = make(Runner(), **given)
    collector.published(0)
    # the trainer has taken its time
    await until(lambda: queue.ledger.balance()["finished"] == 20)
    assert queue.ledger.balance()["dropped by one_in_six"] > 16 * 4
    assert [group.draw for group in (await collector.collect(1)).groups] == [0, 6, 12, 18]


async def test_aborted_groups_are_not_reported_as_stale(make):
    async def aborted(draw: int) -> Group:
        return Group(draw, [sample(draw, reason="abort")])

    collector, _, _ = make(Runner(aborted))
    collector.published(0)
    with pytest.raises(EmptyBatch) as caught:
        await collector.collect(1)
    assert (
        str(caught.value)
        == "step 1 has 0 of 1 groups after 16 draws: 16 were aborted by an engine; see the"
        " engines' logs for the reason"
    )


# --- groups that failed ---------------------------------------------------------------------------


def failure(draw: int, place: str = "a.py:3") -> Failure:
    return Failure(
        "timeout", "workflow mine", f"f:{draw} (draw {draw})", "too late", f" ({place} in f)"
    )


def failing(which: Callable[[int], bool]) -> Reply:
    async def reply(draw: int) -> Group:
        if which(draw):
            return Group(draw, [], failures=[failure(draw, f"a.py:{draw % 2}")])
        return Group(draw, [sample(draw, 1)])

    return reply


@pytest.mark.parametrize("staleness", [0, 1])
async def test_a_group_that_failed_is_replaced_and_never_made_again(make, staleness):
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


async def test_where_all_may_fail_a_step_gives_up_after_many_draws(make):
    collector, _, _ = make(Runner(failing(lambda draw: True)), max_failed=1.0)
    collector.published(0)
    with pytest.raises(EmptyBatch, match="after 16 draws: 16 failed; the commonest failure: work"):
        await collector.collect(1)


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


# --- rewards that failed --------------------------------------------------------------------------


def unscored(draw: int, *, all_of: bool) -> Group:
    """A group of two samples of which one or both have no score."""
    where = f"sample 1 of draw {draw}"
    found = [Failure("error", "reward.parts.rm", where, "down", "")] * (1 + all_of)
    rewards = FailureCounts(samples=2, errors=len(found), unscored=found)
    return Group(draw, [] if all_of else [sample(draw, 1)], rewards=rewards)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("share", "fails", "ends"),
    [
        (0.05, {3}, ""),
        (0.1, {3, 9}, ""),
        (0.1, {3, 5, 9}, "step 1: 3 of 20 rewards failed, which is more than reward.max_failed"),
        (0.0, {3}, "1 of 20 rewards failed"),
        (1.0, set(range(10)), ""),
    ],
)
def test_the_share_of_rewards_that_may_fail(make, staleness, share, fails, ends):
    async def reply(draw: int) -> Group:
        return unscored(draw, all_of=False) if draw in fails else Group(draw, [sample(draw, 1)])

    async def main() -> None:
        collector, queue, _ = make(
            Runner(reply),
            max_staleness=staleness,
            prompts_per_step=10,
            samples_per_prompt=2,
            reward={"max_failed": share},
        )
        collector.published(0)
        if ends:
            with pytest.raises(TooManyFailed, match=re.escape(ends)):
                await collector.collect(1)
            await collector.halt()
            return
        done = await collector.collect(1)
        assert len(done.drop_counts.rewards.unscored) >= len(fails)
        assert "failed" not in queue.ledger.balance()
        await collector.halt()

    asyncio.run(main())


async def test_a_group_without_scores_is_replaced(make):
    async def reply(draw: int) -> Group:
        return unscored(draw, all_of=True) if draw == 1 else Group(draw, [sample(draw, 1)])

    collector, queue, _ = make(
        Runner(reply), max_staleness=0, prompts_per_step=4, reward={"max_failed": 0.9}
    )
    collector.published(0)
    done = await collector.collect(1)
    assert [group.draw for group in done.groups] == [0, 2, 3, 4]
    assert done.drop_counts.given_up == 1
    assert queue.ledger.state(1) == "failed"


async def test_built_in_graders_that_fail_on_a_whole_step_end_it(make):
    async def reply(draw: int) -> Group:
        return Group(draw, [sample(draw, 1)], rewards=FailureCounts(samples=2, timeouts=2))

    collector, _, _ = make(Runner(reply), max_staleness=0, prompts_per_step=4, samples_per_prompt=2)
    collector.published(0)
    with pytest.raises(TooManyFailed, match="built-in graders failed on all 8 samples"):
        await collector.collect(1)
