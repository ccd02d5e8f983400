"""A rank that sends to engines, or helps to, and when it stops. No engine runs."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import asdict, replace
from itertools import chain, repeat
from types import SimpleNamespace
from typing import Any

import pytest
from links_kit import ADDRESS, CPU, FLAT, Engine, Group, group, order_for

from rollout.weight_sync import links
from rollout.weight_sync.groups import rank_sender
from rollout.weight_sync.groups.assignment import Served
from rollout.weight_sync.groups.link import RemoteLink
from rollout.weight_sync.groups.rank_sender import RankSender
from rollout.weight_sync.links import DistributedTransport
from rollout.weight_sync.process_group import GroupAddress


def sender_to(rank: int = 0, **groups: Any) -> RankSender:
    """A rank with these groups, in each of which it is `rank`."""
    sender = RankSender(CPU, 60.0)
    sender._groups = groups
    sender._orders = [order_for(engine, rank) for engine in groups]
    return sender


def stopped(**last: int) -> str:
    return json.dumps(last)


FOURTH: Any = SimpleNamespace(index=4)


def test_nothing_is_sent_once_rank_0_has_given_up() -> None:
    sent: list[str] = []
    sender = sender_to(a=group(lambda: sent.append("a")))
    sender.send(FOURTH, FLAT, lambda: stopped(a=3))
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
    sender.send(FOURTH, FLAT, lambda: stopped(called=4, waits=3))
    assert sent == ["called"]


def test_rank_0_leaves_the_groups_that_it_helps_in_when_it_gives_up() -> None:
    """All other ranks do, and the engine enters a new one."""
    engines = [Engine(f"engine-{i}") for i in range(2)]
    transport = DistributedTransport(device=CPU, timeout_s=5.0, probe_s=5.0)
    groups = [Group(GroupAddress(**ADDRESS), rank) for rank in (1, 0)]  # type: ignore[arg-type]
    helped = RemoteLink(engines[0], "gloo", Served(1, (0,)), CPU, 5.0)
    own = links.Link(engines[1], "gloo", CPU, 5.0)
    helped.group, own.group = groups  # type: ignore[assignment]
    transport._links = {engines[0]: helped, engines[1]: own}
    transport._engines = engines
    assert asyncio.run(transport.give_up()) == {}
    assert [group.is_open for group in groups] == [False, True]


def test_a_rank_waits_for_a_slow_bucket_while_rank_0_does() -> None:
    sender = sender_to(a=group(lambda: time.sleep(0.3)))
    sender._timeout_s = 0.01
    sender.send(FOURTH, FLAT, lambda: None)
    assert list(sender._groups) == ["a"]


def test_who_fails_while_its_rank_sends_is_left_and_the_others_get_the_bucket() -> None:
    sent: list[str] = []
    hung = threading.Event()
    sender = sender_to(a=group(lambda: hung.wait(30), hung.set), b=group(lambda: sent.append("b")))
    answers = chain([None], repeat(stopped(b=4)))
    sender.send(FOURTH, FLAT, lambda: next(answers))
    assert sent == ["b"]
    assert hung.is_set()
    assert list(sender._groups) == ["b"]


def test_a_send_that_waits_ends_when_rank_0_gives_up() -> None:
    released = threading.Event()
    sender = sender_to(a=group(lambda: released.wait(30), released.set))
    answers = iter([None, None, stopped(a=3)])
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

    def given_up() -> None:
        looks.append(1)
        if len(looks) == 3:
            waits.set()

    helper = sender_to(1, a=group(lambda: arrived.wait(30)))
    thread = threading.Thread(target=lambda: helper.send(FOURTH, FLAT, given_up))
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
    told = helper.open(json.dumps([asdict(order_for("a", 1))]))
    assert json.loads(told) == {"a": "it has no group"}


def test_a_second_engine_that_hangs_is_left_at_its_limit_once_rank_0_has_given_up() -> None:
    """It was called for the bucket, and its broadcast alone ends at three times the limit."""
    released = threading.Event()
    sender = sender_to(a=group(lambda: released.wait(30), released.set))
    sender._timeout_s = 0.1
    began = time.monotonic()

    def given_up() -> str | None:
        return stopped(a=4) if time.monotonic() - began > 0.2 else None

    sender.send(FOURTH, FLAT, given_up)
    assert released.is_set()
    assert sender._groups == {}


def test_a_rank_enters_the_group_of_the_one_that_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sender, "WeightGroup", Group)
    monkeypatch.setattr(Group, "made", [])
    helper = RankSender(CPU, 60.0)
    orders = [order_for("engine-0", 1), order_for("engine-1", 0)]
    helper.open(json.dumps([asdict(orders[0])]))
    helper.enter({1: "nothing of the kind"})
    helper.enter({1: json.dumps({"engine-0": "no route to host"})})
    helper.enter({1: json.dumps({"engine-0": None})})
    assert helper._meetings == {}
    place = {1: json.dumps({"engine-0": ADDRESS})}
    helper.enter(place)
    helper._end_meetings()
    [made] = Group.made
    assert (made.address, made.rank) == (GroupAddress(**ADDRESS), 1)  # type: ignore[arg-type]
    helper.enter(place)  # the sender has opened another one
    assert helper._groups == {}
    assert not made.is_open, "the old group was closed first"
    helper._end_meetings()
    assert len(Group.made) == 2
    helper._orders = orders[1:]  # of which it is the sender
    helper.enter({1: json.dumps({"engine-1": ADDRESS})})
    assert helper._meetings == {}
    again = replace(orders[0], group=ADDRESS["name"])
    assert json.loads(helper.open(json.dumps([asdict(again)]))) == {"engine-0": None}
