"""The interface of gloo and NCCL, where host names stand for loopback or for another network."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from rlcore.launch import process
from rlcore.launch.environment import INTERFACE
from rlcore.launch.process import (
    CHOSEN_INTERFACE,
    NCCL_INTERFACE,
    address_for_others,
    choose_interface,
)

# What a name stands for on node 0, and the route from each node's ranks to a host.
NODE_0 = {"node-0": "127.0.0.1", "10.0.0.2": "10.0.0.1"}
NODE_1 = {"node-0": "10.0.0.2"}


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29400"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    for name in (INTERFACE, NCCL_INTERFACE, CHOSEN_INTERFACE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_each_node_takes_the_address_that_the_others_reach(
    ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the master's, whose own name is 127.0.1.1 there, as Debian has it."""
    store = HashStore()
    routes = iter([NODE_1, NODE_0])

    def address(rank: int) -> str:
        return address_for_others(store, rank, 2)

    with ThreadPoolExecutor(2) as pool:
        monkeypatch.setattr(process, "route_to", lambda host: next(routes)[host])
        other = pool.submit(address, 1).result()
        monkeypatch.setattr(process, "route_to", NODE_0.__getitem__)
        assert pool.submit(address, 0).result(timeout=10) == "10.0.0.1"
    assert other == "10.0.0.2"


@pytest.mark.parametrize("master", ["127.0.0.1", "localhost", "node-0"])
def test_several_launchers_of_one_machine_keep_to_loopback(
    ranks: None, monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setattr(process, "route_to", lambda host: "127.0.0.1")
    store = HashStore()
    store.set("address/1", "127.0.0.1")
    assert address_for_others(store, 0, 2) == "127.0.0.1"


def test_what_the_user_says_stays(ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "route_to", lambda host: "10.0.0.1")
    monkeypatch.setattr(process, "interface_of", {"10.0.0.1": "ib0"}.get)
    monkeypatch.setenv(INTERFACE, "eth7")
    store = HashStore()
    choose_interface(store, 1, 2)
    assert store.get("address/1") == b"10.0.0.1", "a rank of another node may wait for it"
    assert (os.environ[INTERFACE], os.environ[NCCL_INTERFACE]) == ("eth7", "=ib0")
    assert CHOSEN_INTERFACE not in os.environ, "engines would take it for our choice"
    monkeypatch.delenv(NCCL_INTERFACE)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    choose_interface(HashStore(), 1, 2)
    assert NCCL_INTERFACE not in os.environ, "ranks of one node"
