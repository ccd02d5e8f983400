"""Finished groups across a restart: which come back, which are given up, and in what state their
draws are.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rlcore.data.prompts import PromptStream
from rlcore.data.sample import Sample, VersionSpan
from rlcore.runs.rollouts import decode_samples
from rollout.accounting.journal_reader import read_journal
from rollout.accounting.prompt_queue import PromptQueue
from rollout.collection.buffer import BufferedGroup, GroupBuffer, decode, encode, settle
from rollout.collection.group_runner import Group


def sample(draw: int, index: int, *versions: int) -> Sample:
    """A prompt of two tokens, then two tokens of each version."""
    m = 2 * len(versions)
    return Sample(
        draw=draw, index=index, prompt_id=f"f:{draw}", group_id=draw, rollout_id=2 * draw + index,
        tokens=np.arange(2 + m, dtype=np.int32), loss_mask=np.array([0, 0] + [1] * m, dtype=np.uint8),
        rollout_logprobs=np.float32(np.random.default_rng(draw).normal(size=m) - 7),
        versions=tuple(VersionSpan(version, 2 * at, 2 * at + 2) for at, version in enumerate(versions)),
        finish_reason="stop", reward=draw / 3, reward_parts={"a": 0.1}, label=2**70, metadata={"correct": True},
        baseline_reward=0.25, token_rewards=np.float32(np.arange(m) / 3), prompt_text="é", response_text="x",
    )  # fmt: skip


def kept(draw: int, oldest: int, newest: int) -> BufferedGroup:
    """Versions are policy steps here."""
    return BufferedGroup(
        Group(draw, [sample(draw, 0, oldest, newest), sample(draw, 1, oldest)]), oldest, newest
    )


def new() -> PromptQueue:
    return PromptQueue(PromptStream(50, seed=1, fingerprint="fifty"))


def at_step(draws: PromptQueue, step: int, buffer: GroupBuffer) -> dict[str, object]:
    """Step `step` has two groups, two more are finished, two in flight. The state of its
    checkpoint.
    """
    taken = draws.take(6)
    for draw in taken[:4]:
        draws.ledger.finish(draw)
    for draw in taken[2:4]:
        buffer.put(kept(draw, step - 1, step - 1))
    draws.hand_over(taken[:2], step)
    return json.loads(
        json.dumps({**draws.snapshot(), "ahead": {"steps_done": step, "groups": encode(buffer)}})
    )


def states(draws: PromptQueue) -> dict[int, str]:
    return {draw: draws.ledger.state(draw) for draw in range(len(draws.ledger))}


def test_a_group_comes_back_exactly():
    before = kept(4, 1, 2)
    (after,) = decode(json.loads(json.dumps(encode([before]))))
    assert (after.oldest, after.newest, after.group.draw) == (1, 2, 4)
    for one, two in zip(before.group.samples, after.group.samples, strict=True):
        assert one.to_record() == two.to_record()
        assert one.rollout_logprobs.tobytes() == two.rollout_logprobs.tobytes()
        assert one.token_rewards.tobytes() == two.token_rewards.tobytes()


def test_what_is_no_group_is_refused():
    with pytest.raises(ValueError, match="not encoded samples"):
        decode_samples(b"something else")


def test_ages_are_what_the_scheduler_restores():
    buffer = GroupBuffer()
    for draw, oldest in ((7, 2), (3, 2), (5, 1)):
        buffer.put(kept(draw, oldest, 2))
    assert buffer.ages() == [[1, [5]], [2, [3, 7]]]
    assert [one.group.draw for one in buffer] == [3, 5, 7]


def test_a_group_is_in_the_buffer_once():
    buffer = GroupBuffer()
    buffer.put(kept(1, 0, 0))
    with pytest.raises(ValueError, match="draw 1 is in the buffer already"):
        buffer.put(kept(1, 0, 0))
    assert buffer.take(1).group.draw == 1
    with pytest.raises(ValueError, match="draw 1 is not in the buffer"):
        buffer.take(1)


def test_everything_starts_again(tmp_path: Path):
    """In flight: drawn again. Finished: there."""
    draws = new()
    buffer = GroupBuffer()
    state = at_step(draws, 1, buffer)
    again = new()
    back = GroupBuffer()
    again.restore(state)
    assert settle(again, back, decode(state["ahead"]["groups"]), step=1) == []
    assert [one.group.draw for one in back] == [2, 3]
    assert [states(again)[draw] for draw in range(6)] == ["consumed by step 1"] * 2 + [
        "finished"
    ] * 2 + ["requeued"] * 2
    assert again.take(3) == [4, 5, 6]


def test_the_trainer_goes_back_and_the_service_stays(tmp_path: Path):
    """What was made by weights up to the checkpoint's counts, whenever it was finished; the rest is
    drawn again.
    """
    draws = new()
    buffer = GroupBuffer()
    draws.keep_journal(tmp_path / "ledger.jsonl")
    # 0, 1 trained on; 2, 3 kept; 4, 5 in flight
    state = at_step(draws, 1, buffer)
    for draw in (4, 5):
        draws.ledger.finish(draw)
    buffer.take(2)
    # forgotten with the trainer's step 2
    draws.hand_over([2, 4], 2)
    buffer.put(kept(5, 1, 1))  # by weights that survive
    taken = draws.take(5)
    assert taken == [6, 7, 8, 9, 10]
    for draw in (7, 8, 9):
        draws.ledger.finish(draw)
    # a token of it by weights that are gone
    buffer.put(kept(7, 1, 2))
    buffer.put(kept(9, 0, 1))
    draws.ledger.drop(8, "zero_variance")

    draws.restore(state)
    assert settle(draws, buffer, decode(state["ahead"]["groups"]), step=1) == [7]
    draws.keep_journal(tmp_path / "ledger.jsonl")
    draws.close()
    assert [one.group.draw for one in buffer] == [2, 3, 5, 9]
    assert states(draws) == {
        0: "consumed by step 1", 1: "consumed by step 1", 2: "finished", 3: "finished", 4: "requeued", 5: "finished",
        6: "requeued", 7: "requeued", 8: "requeued", 9: "finished",
    }  # fmt: skip
    assert draws.take(5) == [4, 6, 7, 8, 10]
    history = read_journal(tmp_path / "ledger.jsonl")
    assert [(transition, detail) for _, transition, detail, rewound in history.life(7) if rewound is None] == [
        ("drawn", None), ("finished", None), ("requeued", "rolled_back"),
    ]  # fmt: skip


def test_a_group_is_adopted_whatever_the_book_says_of_its_draw():
    draws = new()
    draws.take(2)
    draws.give_back(0)
    draws.give_back(1)
    draws.adopt(1)  # requeued
    draws.adopt(2)  # the very next, not drawn yet
    draws.adopt(4)  # behind one that was drawn with it
    draws.adopt(4)  # finished already
    draws.follow()
    assert states(draws) == {
        0: "requeued",
        1: "finished",
        2: "finished",
        3: "in flight",
        4: "finished",
    }
    assert draws.take(2) == [0, 5]


def test_the_beginning_is_as_if_nothing_had_been_drawn():
    draws = new()
    buffer = GroupBuffer()
    at_step(draws, 1, buffer)
    draws.give_back(3)
    assert draws.beginning() == new().snapshot()


def test_a_group_of_a_consumed_draw_is_a_contradiction():
    draws = new()
    buffer = GroupBuffer()
    state = at_step(draws, 1, buffer)
    draws.restore(state)
    with pytest.raises(ValueError, match="draw 0 is consumed by step 1, expected in flight"):
        settle(draws, buffer, [kept(0, 0, 0)], step=1)


@pytest.mark.parametrize("count", [1, 12])
def test_the_book_is_read_as_often_for_many_groups_as_for_one(
    monkeypatch: pytest.MonkeyPatch, count: int
):
    """Reading it takes milliseconds where a run has made millions of draws, and a checkpoint keeps
    thousands of groups.
    """
    draws = new()
    times = []
    read = draws.ledger._array
    monkeypatch.setattr(draws.ledger, "_array", lambda *start: times.append(start) or read(*start))
    settle(draws, GroupBuffer(), [kept(draw, 0, 0) for draw in range(count)], step=0)
    assert len(times) == 2, "where the stream is, and what is unsettled"
    assert draws.take(1) == [count]
