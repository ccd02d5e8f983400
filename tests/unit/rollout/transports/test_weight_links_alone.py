"""Meeting an engine for weights, without one: where it is told that we are, and what becomes of errors in threads."""

from __future__ import annotations

import asyncio
import threading

import psutil
import pytest
import torch

from rlcore.errors import EngineFailed
from rollout.engines.weight_group import GroupAddress, WeightGroup, open_store
from rollout.transports.distributed import Link, in_thread, own_address


def other_addresses() -> list[str]:
    """Of this machine, beside loopback."""
    found = [one.address for addresses in psutil.net_if_addrs().values() for one in addresses if one.family.name == "AF_INET"]
    return [address for address in found if not address.startswith("127.")]


@pytest.mark.parametrize("url", ["http://127.0.0.1:30000", "http://localhost:30000", "http://127.0.0.1"])
def test_engines_on_loopback_meet_us_there(url: str) -> None:
    assert own_address(url) == "127.0.0.1"


@pytest.mark.skipif(not other_addresses(), reason="this machine has loopback alone")
def test_engines_elsewhere_meet_us_at_the_address_that_faces_them() -> None:
    host = other_addresses()[0]
    assert own_address(f"http://{host}:30000") == host
    store, port = open_store(host, 10.0)
    address = GroupAddress(host, port, 2, "gloo", 10.0)
    got: list[torch.Tensor] = []

    def engine() -> None:
        got.append(WeightGroup(address, 1, device=torch.device("cpu")).receive(3).clone())

    other = threading.Thread(target=engine)
    other.start()
    group = WeightGroup(address, 0, device=torch.device("cpu"), store=store)
    group.send(torch.tensor([1, 2, 3], dtype=torch.uint8))
    other.join(10)
    group.close()
    assert got[0].tolist() == [1, 2, 3]


class Gone:
    name, group_ranks, in_group = "engine-0", 1, None

    @property
    def url(self) -> str:
        raise EngineFailed("engine engine-0 does not run; start it first")


class Nowhere(Gone):
    url = "http://no-such-host.invalid:1"       # type: ignore[assignment]


@pytest.mark.parametrize(("engine", "why"), [(Gone(), "does not run"), (Nowhere(), "engine-0 cannot be met: ")])
def test_an_engine_that_cannot_be_met_is_out_and_not_the_run(engine: Gone, why: str) -> None:
    told = asyncio.run(Link(engine, "gloo", torch.device("cpu"), 5.0).join())
    assert told is not None
    assert why in told


def test_whatever_a_thread_meets_is_told_to_who_waits() -> None:
    async def wait() -> None:
        await asyncio.wait_for(in_thread(lambda: [][0]), 5)

    with pytest.raises(IndexError):
        asyncio.run(wait())
