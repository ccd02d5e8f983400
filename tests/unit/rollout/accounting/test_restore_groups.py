"""Finished groups across a restart: which come back, and the states of their draws."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rlcore.data.prompts import PromptStream
from rlcore.data.sample import Sample, VersionSpan
from rlcore.runs.rollouts import decode_samples
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.buffer import BufferedGroup, decode, restore_groups
from rollout.collection.group_runner import Group


def sample(draw: int, index: int, *versions: int) -> Sample:
    """A prompt of two tokens, then two tokens of each version."""
    m = 2 * len(versions)
    return Sample(
        draw=draw,
        index=index,
        prompt_id=f"f:{draw}",
        group_id=draw,
        rollout_id=2 * draw + index,
        tokens=np.arange(2 + m, dtype=np.int32),
        loss_mask=np.array([0, 0] + [1] * m, dtype=np.uint8),
        rollout_logprobs=np.float32(np.random.default_rng(draw).normal(size=m) - 7),
        versions=tuple(
            VersionSpan(version, 2 * at, 2 * at + 2) for at, version in enumerate(versions)
        ),
        finish_reason="stop",
        reward=draw / 3,
        reward_parts={"a": 0.1},
        label=2**70,
        metadata={"correct": True},
        baseline_reward=0.25,
        token_rewards=np.float32(np.arange(m) / 3),
        prompt_text="é",
        response_text="x",
    )


def buffered(draw: int, oldest: int, newest: int) -> BufferedGroup:
    """Versions are policy steps here."""
    return BufferedGroup(
        Group(draw, [sample(draw, 0, oldest, newest), sample(draw, 1, oldest)]), oldest, newest
    )


def new() -> PromptQueue:
    return PromptQueue((), PromptStream(50, seed=1, fingerprint="fifty"))


def at_step(queue: PromptQueue, step: int, buffer: dict[int, BufferedGroup]) -> dict[str, object]:
    """The state of a checkpoint: two groups for `step`, two more finished, two in flight."""
    taken = queue.take(6)
    for draw in taken[:4]:
        queue.ledger.finish(draw)
    for draw in taken[2:4]:
        buffer[draw] = buffered(draw, step - 1, step - 1)
    queue.hand_over(taken[:2], step)
    ahead = {"steps_done": step, "groups": [one.encoded for one in buffer.values()]}
    return json.loads(json.dumps({**queue.snapshot(), "ahead": ahead}))


def states(queue: PromptQueue) -> dict[int, str]:
    return {draw: queue.ledger.state(draw) for draw in range(len(queue.ledger))}


def test_a_group_comes_back_exactly():
    before = buffered(4, 1, 2)
    (after,) = decode(json.loads(json.dumps([before.encoded])))
    assert (after.oldest, after.newest, after.group.draw) == (1, 2, 4)
    for one, two in zip(before.group.samples, after.group.samples, strict=True):
        assert one.to_record() == two.to_record()
        assert one.rollout_logprobs.tobytes() == two.rollout_logprobs.tobytes()
        assert one.token_rewards.tobytes() == two.token_rewards.tobytes()


def test_what_is_no_group_is_refused():
    with pytest.raises(ValueError, match="not encoded samples"):
        decode_samples(b"something else")


def test_everything_starts_again():
    """In flight: drawn again. Finished: there."""
    queue = new()
    buffer: dict[int, BufferedGroup] = {}
    state = at_step(queue, 1, buffer)
    again = new()
    again.restore(state)
    back = restore_groups(again, decode(state["ahead"]["groups"]))
    assert list(back) == [2, 3]
    assert [states(again)[draw] for draw in range(6)] == ["consumed by step 1"] * 2 + [
        "finished"
    ] * 2 + ["requeued"] * 2
    assert again.take(3) == [4, 5, 6]


def test_a_group_is_adopted_whatever_the_ledger_says_of_its_draw():
    queue = new()
    queue.take(2)
    queue.give_back(0)
    queue.give_back(1)
    queue.adopt(1, ())  # requeued
    queue.adopt(2, ())  # the very next, not drawn yet
    queue.adopt(4, ())  # behind one that was drawn with it
    queue.adopt(4, ())  # finished already
    queue.follow()
    assert states(queue) == {
        0: "requeued",
        1: "finished",
        2: "finished",
        3: "in flight",
        4: "finished",
    }
    assert queue.take(2) == [0, 5]


def test_the_beginning_is_as_if_nothing_had_been_drawn():
    queue = new()
    buffer: dict[int, BufferedGroup] = {}
    at_step(queue, 1, buffer)
    queue.give_back(3)
    assert queue.beginning() == new().snapshot()


def test_a_group_of_a_consumed_draw_is_a_contradiction():
    queue = new()
    buffer: dict[int, BufferedGroup] = {}
    state = at_step(queue, 1, buffer)
    queue.restore(state)
    with pytest.raises(ValueError, match="draw 0 is consumed by step 1, expected in flight"):
        restore_groups(queue, [buffered(0, 0, 0)])


@pytest.mark.parametrize("count", [1, 12])
def test_the_ledger_is_read_as_often_for_many_groups_as_for_one(
    monkeypatch: pytest.MonkeyPatch, count: int
):
    """Reading it takes milliseconds where a run has made millions of draws, and a checkpoint keeps
    thousands of groups.
    """
    queue = new()
    times = []
    read = queue.ledger._array
    monkeypatch.setattr(queue.ledger, "_array", lambda *start: times.append(start) or read(*start))
    restore_groups(queue, [buffered(draw, 0, 0) for draw in range(count)])
    assert len(times) == 2, "where the stream is, and what is unsettled"
    assert queue.take(1) == [count]
