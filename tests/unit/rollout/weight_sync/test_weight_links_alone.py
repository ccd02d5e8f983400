"""Links without an engine: the address that an engine is told, and errors in threads."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import psutil
import pytest
import torch

from rlcore.errors import EngineFailed
from rlcore.stores import bound_store
from rlcore.weights import Bucket
from rollout.weight_sync import process_group
from rollout.weight_sync.groups import link as links
from rollout.weight_sync.groups.link import Link
from rollout.weight_sync.links import DistributedTransport
from rollout.weight_sync.process_group import (
    GroupAddress,
    WeightGroup,
    in_thread,
    own_address,
    start_thread,
)


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
    got: list[torch.Tensor] = []
    place = torch.zeros(3, dtype=torch.uint8)

    def engine() -> None:
        theirs = WeightGroup(address, 1, device=torch.device("cpu"))
        got.append(theirs.receive(3).clone())
        got.append(theirs.receive(3, place))

    other = threading.Thread(target=engine)
    other.start()
    group = WeightGroup(address, 0, device=torch.device("cpu"), store=store)
    group.send(torch.tensor([1, 2, 3], dtype=torch.uint8))
    group.send(torch.tensor([4, 5, 6], dtype=torch.uint8))
    other.join(10)
    group.close()
    assert got[0].tolist() == [1, 2, 3]
    assert got[1] is place
    assert place.tolist() == [4, 5, 6]


class Gone:
    name = "engine-0"
    group_ranks = 1
    in_group = None

    @property
    def url(self) -> str:
        raise EngineFailed("engine engine-0 does not run; start it first")


class Nowhere(Gone):
    url = "http://no-such-host.invalid:1"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("engine", "why"), [(Gone(), "does not run"), (Nowhere(), "engine-0 cannot be met: ")]
)
def test_an_engine_that_cannot_be_met_is_out_and_not_the_run(engine: Gone, why: str) -> None:
    told = asyncio.run(Link(engine, "gloo", torch.device("cpu"), 5.0).join())
    assert told is not None
    assert why in told


def test_a_bucket_that_was_given_up_half_way_breaks_its_connection() -> None:
    class Silent(Gone):
        url = "http://127.0.0.1:1"  # type: ignore[assignment]

        async def receive_bucket(self, index: int, flat: None) -> None:
            await asyncio.Event().wait()

    class Group:
        closed = threading.Event()

        def start_sending(self, flat: torch.Tensor) -> Future[bool]:
            return start_thread(lambda: self.closed.wait(20), torch.device("cpu"))

        def close(self) -> None:
            self.closed.set()

    async def give_up() -> None:
        link = Link(Silent(), "gloo", torch.device("cpu"), 5.0)
        link.group = Group()  # type: ignore[assignment]
        sending = asyncio.ensure_future(link.send([0], None, torch.empty(0, dtype=torch.uint8)))
        await asyncio.sleep(0.05)
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled()
        assert not link.is_whole

    asyncio.run(asyncio.wait_for(give_up(), 20))
    assert Group.closed.is_set()


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

    class Dies(Gone):
        url = "http://127.0.0.1:1"  # type: ignore[assignment]
        in_group: str | None = None  # type: ignore[assignment]

        async def join_group(self, address: GroupAddress, rank: int) -> None:
            self.in_group = address.name
            # it may wait for a bucket while another engine holds up the one before
            assert address.timeout_s > 2 * 15.0

        async def receive_bucket(self, index: int, flat: None) -> None:
            await asyncio.sleep(0.1)
            raise EngineFailed("engine engine-0 died")

    made = NeverTogether()
    monkeypatch.setattr(process_group, "make_group", lambda *_: made)

    async def publish() -> None:
        link = Link(Dies(), "nccl", torch.device("cpu"), 15.0)
        assert await link.join() is None
        began = time.monotonic()
        flat = torch.zeros(4, dtype=torch.uint8)
        assert await link.send([0], None, flat) == "engine engine-0 died"
        assert time.monotonic() - began < 12, "by far less than the limit"
        assert not link.is_whole

    asyncio.run(publish())
    assert not made.aborted.is_set()
    made.given_up.set()
    assert made.aborted.wait(60)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, "engine engine-0 was not met by our side within 0.3 s"),
        (EngineFailed("engine engine-0 is full"), "engine engine-0 is full"),
    ],
)
def test_a_group_that_comes_together_after_it_was_given_up_is_closed(
    monkeypatch: pytest.MonkeyPatch, error: EngineFailed | None, expected: str
) -> None:
    """Our side of a meeting has a deadline, and is not waited for when the engine fails first."""

    class Joins(Gone):
        url = "http://127.0.0.1:1"  # type: ignore[assignment]

        async def join_group(self, address: GroupAddress, rank: int) -> None:
            if error is not None:
                raise error

    go_on = threading.Event()
    late: list[str] = []

    def group(*_: object, **__: object) -> SimpleNamespace:
        assert go_on.wait(20)
        return SimpleNamespace(close=lambda: late.append("closed"))

    monkeypatch.setattr(links, "WeightGroup", group)
    monkeypatch.setattr(links, "GROUP_JOIN_S", 0.3)

    async def meet() -> None:
        told = await Link(Joins(), "gloo", torch.device("cpu"), 5.0).join()
        assert told == expected
        go_on.set()
        while not late:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(meet(), 20))


def test_the_weights_go_to_the_engines_that_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    class Probed(Gone):
        url = "http://127.0.0.1:1"  # type: ignore[assignment]

        def __init__(self, health: dict[str, str | None] | None) -> None:
            self.found = health

        async def health(self) -> dict[str, str | None]:
            if self.found is None:
                raise EngineFailed("engine engine-0 does not answer")
            return self.found

    async def done(link: Link, *_: object) -> None:
        calls.append(link.engine)

    calls: list[object] = []
    monkeypatch.setattr(Link, "join", done)
    monkeypatch.setattr(Link, "send", done)
    good, bad = Probed({"gpu": None}), Probed(None)
    made = DistributedTransport(device=torch.device("cpu"), timeout_s=5.0, probe_s=5.0)

    async def publish() -> None:
        assert await made.open([bad, good], [Bucket(0, ())]) == {
            bad: "engine engine-0 does not answer"
        }
        assert await made.send(Bucket(0, ()), torch.zeros(4, dtype=torch.uint8)) == {}

    asyncio.run(asyncio.wait_for(publish(), 20))
    assert calls == [good, good], "joined, then sent to"


def test_whatever_a_thread_meets_is_told_to_who_waits() -> None:
    async def wait() -> None:
        await asyncio.wait_for(in_thread(lambda: [][0], torch.device("cpu")), 60)

    with pytest.raises(IndexError):
        asyncio.run(wait())
