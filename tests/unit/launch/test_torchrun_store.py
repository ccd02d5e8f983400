"""The store of torchrun's agents listens where it is told to."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from rlcore import stores
from rlcore.launch import torchrun
from tests.listeners import EVERYWHERE, addresses
from tests.ports import free_port

LIMIT = timedelta(seconds=20)


def test_it_listens_on_the_address_of_node_0_alone() -> None:
    port = free_port()
    before = addresses(os.getpid())
    store = torchrun.store_of_agents("127.0.0.1", port, 1, True, LIMIT, multi_tenant=True)
    assert addresses(os.getpid()) - before <= {"127.0.0.1"}
    other = torchrun.store_of_agents("127.0.0.1", port, 1, False, LIMIT, multi_tenant=True)
    other.set("a", "1")
    assert store.get("a") == b"1"
    del other, store
    # the port is free again for the next start
    again = torchrun.store_of_agents("127.0.0.1", port, 1, True, LIMIT)
    assert isinstance(again, TCPStore)


def test_a_name_of_this_machine_that_stands_for_loopback_is_no_address_for_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = addresses(os.getpid())
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert not stores.reaches_us("node-0")
    assert "node-0 is 127.0.1.1 here" in capsys.readouterr().err
    assert stores.reaches_us("localhost")
    assert stores.reaches_us("127.0.1.1")
    held = stores.bound_store("node-0", 5.0)
    assert addresses(os.getpid()) - before == {EVERYWHERE}, "under Ray too"
    del held


def test_it_is_torchrun() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "rlcore.launch.torchrun", "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "--master-addr" in said.stdout
