"""A rank that sends to engines, or helps to, and when it stops. No engine runs."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, replace
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
from links_kit import ADDRESS, CPU, FLAT, Group, group, order_for

from rollout.weight_sync import sender as sender_module
from rollout.weight_sync.digests import Digest, new_order
from rollout.weight_sync.process_group import GroupAddress, WorkThread
from rollout.weight_sync.sender import GroupSender, Order


def sender_to(rank: int = 0, **groups: Any) -> GroupSender:
    """A rank with these groups, in each of which it is `rank`."""
    sender = GroupSender(CPU, 60.0)
    sender._groups = groups
    sender._orders = [order_for(engine, rank) for engine in groups]
    return sender


def orders(*given: Order, digests: tuple[str, ...] = ()) -> dict[str, Any]:
    known = [order.engine for order in given]
    return {"engines": [asdict(order) for order in given], "digests": digests, "known": known}


FOURTH: Any = SimpleNamespace(index=4)


def test_nothing_is_sent_once_rank_0_has_given_up() -> None:
    sent: list[str] = []
    sender = sender_to(a=group(lambda: sent.append("a")))
    sender.send(FOURTH, FLAT, lambda: {"a": 3})
    assert sent == []
    sender.send(FOURTH, FLAT, lambda: None)
    assert sent == ["a"]


def test_an_engine_gets_the_bucket_for_which_it_was_called_though_rank_0_has_given_up() -> None:
    """It waits in a broadcast that nothing else ends. The one that failed gets nothing."""
    sent: list[str] = []
    sender = sender_to(
        failed=group(lambda: sent.append("failed")),
        called=group(lambda: sent.append("called")),
        waits=group(lambda: sent.append("waits")),
    )
    sender.send(FOURTH, FLAT, lambda: {"called": 4, "waits": 3})
    assert sent == ["called"]


def test_a_rank_waits_for_a_slow_bucket_while_rank_0_does() -> None:
    sender = sender_to(a=group(lambda: time.sleep(0.3)))
    sender._timeout_s = 0.01
    sender.send(FOURTH, FLAT, lambda: None)
    assert list(sender._groups) == ["a"]


def test_who_fails_while_its_rank_sends_is_left_and_the_others_get_the_bucket() -> None:
    sent: list[str] = []
    hung = threading.Event()
    sender = sender_to(a=group(lambda: hung.wait(30), hung.set), b=group(lambda: sent.append("b")))
    answers = chain([None], repeat({"b": 4}))
    sender.send(FOURTH, FLAT, lambda: next(answers))
    assert sent == ["b"]
    assert hung.is_set()
    assert list(sender._groups) == ["b"]


def test_a_send_that_waits_ends_when_rank_0_gives_up() -> None:
    released = threading.Event()
    sender = sender_to(a=group(lambda: released.wait(30), released.set))
    answers = iter([None, None, {"a": 3}])
    sender.send(FOURTH, FLAT, lambda: next(answers))
    assert released.is_set()
    assert sender._groups == {}


def test_a_group_that_fails_is_left_out_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[str] = []

    def fails() -> None:
        raise RuntimeError("connection reset by peer")

    sender = sender_to(a=group(fails), b=group(lambda: sent.append("b")))
    for index in range(2):
        bucket: Any = SimpleNamespace(index=index)
        sender.send(bucket, FLAT, lambda: None)
    assert sent == ["b", "b"]
    assert list(sender._groups) == ["b"]
    assert caplog.messages == [
        "engine a is not served any more: bucket 0 was not sent: connection reset by peer"
    ]


def test_a_rank_that_helps_is_no_bucket_ahead_of_the_sender() -> None:
    """On a GPU it would queue the trainer's next broadcasts in front of what it passes on, and the
    sender joins those when this is done.
    """
    arrived = threading.Event()
    looks: list[int] = []
    waits = threading.Event()

    def stopped() -> None:
        looks.append(1)
        if len(looks) == 3:
            waits.set()

    helper = sender_to(1, a=group(lambda: arrived.wait(30)))
    thread = threading.Thread(target=lambda: helper.send(FOURTH, FLAT, stopped))
    thread.start()
    assert waits.wait(30)
    arrived.set()
    thread.join(30)
    assert not thread.is_alive()
    assert list(helper._groups) == ["a"]


def test_a_group_that_fails_while_its_rank_helps_is_left(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise RuntimeError("connection reset by peer")

    helper = sender_to(1, a=group(fails))
    helper.send(FOURTH, FLAT, lambda: None)
    assert caplog.messages == [
        "engine a is not served any more: bucket 4 was not sent: connection reset by peer"
    ]
    assert helper.open(orders(order_for("a", 1)), []) == {"a": "it has no group"}


def test_a_second_engine_that_hangs_is_left_at_its_limit_once_rank_0_has_given_up() -> None:
    """It was called for the bucket, and its broadcast alone ends at three times the limit."""
    released = threading.Event()
    sender = sender_to(a=group(lambda: released.wait(30), released.set))
    sender._timeout_s = 0.1
    began = time.monotonic()

    def stopped() -> dict[str, int] | None:
        return {"a": 4} if time.monotonic() - began > 0.2 else None

    sender.send(FOURTH, FLAT, stopped)
    assert released.is_set()
    assert sender._groups == {}


def test_a_rank_enters_the_group_of_the_one_that_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "WeightGroup", Group)
    monkeypatch.setattr(Group, "made", [])
    helper = GroupSender(CPU, 60.0)
    helping, sending = order_for("engine-0", 1), order_for("engine-1", 0)
    helper.open(orders(helping), [])
    helper.enter({1: {"engine-0": "no route to host"}})
    helper.enter({1: {"engine-0": None}})
    assert helper._joining == {}
    answers = {1: {"engine-0": ADDRESS}}
    helper.enter(answers)
    helper._end_joining()
    [made] = Group.made
    assert (made.address, made.rank) == (GroupAddress(**ADDRESS), 1)  # type: ignore[arg-type]
    helper.enter(answers)  # the sender has opened another one
    assert helper._groups == {}
    assert not made.is_open, "the old group was closed first"
    helper._end_joining()
    assert len(Group.made) == 2
    helper._orders = [sending]
    helper.enter({1: {"engine-1": ADDRESS}})
    assert helper._joining == {}
    again = replace(helping, group=ADDRESS["name"])
    assert helper.open(orders(again), []) == {"engine-0": None}


def test_the_group_of_an_engine_that_has_left_is_closed() -> None:
    closed: list[str] = []
    sender = sender_to(gone=group(lambda: None, lambda: closed.append("gone")))
    sender.open(orders(order_for("engine-0", 1)), [])
    assert closed == ["gone"]


def test_what_was_sent_is_digested_once_with_the_keys_of_the_order() -> None:
    """Not after a failure; and whether this rank serves engines or not."""
    kinds = [new_order("xxh3"), new_order("linear")]
    sender = GroupSender(CPU, 5.0)
    sender.open(orders(digests=tuple(kinds)), [])
    expected = [Digest(order) for order in kinds]
    for digest in expected:
        digest.add(FLAT)
    sender.send(FOURTH, FLAT, lambda: None)
    sender.send(FOURTH, FLAT, dict)
    assert sender.finish() == {digest.order: digest.read() for digest in expected}


def test_after_a_failure_the_groups_stay_whose_engines_received_all_that_was_sent() -> None:
    """NCCL completes a small broadcast that no engine receives: the next would be off by one."""
    closed: list[str] = []

    def counted(name: str) -> Any:
        return group(lambda: None, lambda: closed.append(name))

    names = ("failed", "whole", "uncalled", "helped")
    sender = sender_to(**{name: counted(name) for name in names}, absent=counted("absent"))
    sender._orders = [
        replace(order_for(name), trainer=(1, 2) if name == "helped" else (1,)) for name in names
    ]
    sender.send(FOURTH, FLAT, lambda: None)
    meeting = WorkThread(CPU).start(lambda: group(lambda: None, lambda: closed.append("late")))
    sender._joining = {"late": meeting}
    sender.end(done=False, stopped={"whole": 4, "uncalled": 3, "helped": 4})
    assert set(sender._groups) == {"whole", "absent"}
    meeting.result(20)
    assert sorted(closed) == ["failed", "helped", "late", "uncalled"]
    sender.end(done=True, stopped=None)
    sender.close()
    assert sorted(closed)[0] == "absent"
    assert sender._groups == {}
