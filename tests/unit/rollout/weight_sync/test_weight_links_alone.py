"""Links without an engine: the address that an engine is told, and errors in threads."""

from __future__ import annotations

import asyncio
import threading

import psutil
import pytest
import torch

from rlcore.errors import EngineFailed
from rlcore.weights import Bucket
from rollout.weight_sync.process_group import (
    GroupAddress,
    Link,
    WeightGroup,
    in_thread,
    open_store,
    own_address,
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
    store, port = open_store(host, 10.0)
    address = GroupAddress(host, port, 2, "gloo", 10.0)
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

        def send(self, flat: torch.Tensor) -> None:
            assert self.closed.wait(20)

        def close(self) -> None:
            self.closed.set()

    async def give_up() -> None:
        link = Link(Silent(), "gloo", torch.device("cpu"), 5.0)
        link.group = Group()  # type: ignore[assignment]
        sending = asyncio.ensure_future(link.send(Bucket(0, ()), torch.empty(0, dtype=torch.uint8)))
        await asyncio.sleep(0.05)
        sending.cancel()
        await asyncio.wait({sending})
        assert sending.cancelled()
        assert not link.is_whole

    asyncio.run(asyncio.wait_for(give_up(), 20))
    assert Group.closed.is_set()


def test_whatever_a_thread_meets_is_told_to_who_waits() -> None:
    async def wait() -> None:
        await asyncio.wait_for(in_thread(lambda: [][0]), 5)

    with pytest.raises(IndexError):
        asyncio.run(wait())
