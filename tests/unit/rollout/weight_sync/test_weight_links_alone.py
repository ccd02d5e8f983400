"""Links without an engine: the address that an engine is told, and errors in threads."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from links_kit import CPU, FLAT, Engine, order_for

from rlcore.errors import EngineFailed
from rlcore.interfaces import RankAddress
from rlcore.stores import bound_store
from rlcore.weights import Bucket
from rollout.weight_sync import process_group
from rollout.weight_sync import sender as sender_module
from rollout.weight_sync.distributed import DistributedTransport
from rollout.weight_sync.process_group import GroupAddress, WeightGroup, own_address, start_thread
from rollout.weight_sync.sender import GroupSender


def other_addresses() -> list[str]:
    """Of this machine, beside loopback."""
    found = [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family.name == "AF_INET"
    ]
    return [address for address in found if not address.startswith("127.")]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:30000", "http://localhost:30000", "http://127.0.0.1"]
)
def test_engines_on_loopback_meet_us_there(url: str) -> None:
    assert own_address(url) == "127.0.0.1"


@pytest.mark.skipif(not other_addresses(), reason="this machine has loopback alone")
def test_engines_elsewhere_meet_us_at_the_address_that_faces_them() -> None:
    host = other_addresses()[0]
    assert own_address(f"http://{host}:30000") == host
    store = bound_store(host, 10.0)
    address = GroupAddress(host, store.port, 2, "gloo", 10.0)
    got: list[list[int]] = []

    def engine() -> None:
        theirs = WeightGroup(address, 1, device=torch.device("cpu"))
        got.extend(theirs.receive(3).tolist() for _ in range(2))

    other = threading.Thread(target=engine)
    other.start()
    group = WeightGroup(address, 0, device=torch.device("cpu"), store=store)
    group.send(torch.tensor([1, 2, 3], dtype=torch.uint8))
    group.send(torch.tensor([4, 5, 6], dtype=torch.uint8))
    other.join(10)
    group.close()
    assert got == [[1, 2, 3], [4, 5, 6]]


def test_an_engine_that_dies_before_its_first_bucket_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its communicator never comes together: our broadcast waits for it, and so does its abort."""

    class NeverTogether:
        given_up = threading.Event()
        aborted = threading.Event()

        def broadcast(self, flat: torch.Tensor, root: int) -> None:
            self.given_up.wait(60)  # torch does at its own limit
            raise RuntimeError("NCCL timeout in communicator initialization.")

        def abort(self) -> None:
            assert self.given_up.wait(60)
            self.aborted.set()

    made = NeverTogether()
    monkeypatch.setattr(process_group, "make_group", lambda *_: made)
    sender = GroupSender(CPU, 15.0)
    order = replace(order_for("engine-0"), backend="nccl", url="http://127.0.0.1:1", trainer=(0,))
    given = {"engines": [asdict(order)], "digests": [], "known": ["engine-0"]}
    answer = sender.open(given, [])["engine-0"]
    # it may wait for a bucket while another engine holds up the one before
    assert answer["timeout_s"] > 2 * 15.0
    began = time.monotonic()
    died = began + 0.1
    sender.send(Bucket(0, ()), FLAT, lambda: {} if time.monotonic() > died else None)
    assert time.monotonic() - began < 12, "by far less than the limit"
    assert sender._groups == {}
    assert not made.aborted.is_set()
    made.given_up.set()
    assert made.aborted.wait(60)


def test_a_group_that_comes_together_after_it_was_given_up_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our side has a deadline, and is not waited for when the engine fails first."""
    go_on = threading.Event()
    late: list[str] = []

    def group(*_: object, **__: object) -> SimpleNamespace:
        assert go_on.wait(20)
        return SimpleNamespace(close=lambda: late.append("closed"))

    monkeypatch.setattr(sender_module, "WeightGroup", group)
    monkeypatch.setattr(sender_module, "GROUP_JOIN_S", 0.3)
    sender = GroupSender(CPU, 5.0)
    order = replace(order_for("engine-0"), url="http://127.0.0.1:1", trainer=(0,))
    given = {"engines": [asdict(order)], "digests": [], "known": ["engine-0"]}
    for ends in (sender._end_joining, sender._leave_joining):
        go_on.clear()
        late.clear()
        sender.open(given, [])
        [meeting] = sender._joining.values()
        ends()
        assert sender._groups == {}
        go_on.set()
        meeting.result(20)
        deadline = time.monotonic() + 20
        while not late and time.monotonic() < deadline:
            time.sleep(0.01)
        assert late == ["closed"]


def test_a_rank_that_finds_no_way_to_an_engine_says_why() -> None:
    order = replace(order_for("engine-0"), url="http://no-such-host.invalid:1", trainer=(0,))
    given = {"engines": [asdict(order)], "digests": [], "known": ["engine-0"]}
    [why] = GroupSender(CPU, 5.0).open(given, []).values()
    assert "Name or service not known" in why or "resolution" in why


def test_the_weights_go_to_the_engines_that_answer() -> None:
    class Silent(Engine):
        async def health(self) -> dict[str, str | None]:
            raise EngineFailed("engine silent does not answer")

    good, bad = Engine("good"), Silent("silent")
    made = DistributedTransport(timeout_s=5.0, probe_s=5.0)
    made.ranks = [RankAddress("here")]
    failed = asyncio.run(made.open([bad, good], [Bucket(0, ())]))
    assert failed == {bad: "engine silent does not answer"}
    [order] = made.orders().ranks[0]["engines"]
    assert order["engine"] == "good"


def test_whatever_a_thread_meets_is_told_to_who_waits() -> None:
    with pytest.raises(IndexError):
        start_thread(lambda: [][0], CPU).result(60)
