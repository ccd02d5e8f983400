"""Stores that only those reach who belong."""

from __future__ import annotations

import os
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rlcore.stores import FolderStore, Store, bound_store, few_store_requests, keys_under


def elsewhere() -> list[str]:
    """Addresses of this machine that others reach."""
    return [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]


def listening(port: int) -> list[str]:
    """The addresses on which this process listens at a port."""
    return [
        one.laddr.ip
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr.port == port
    ]


def test_a_bound_store_listens_on_its_address_alone() -> None:
    store = bound_store("127.0.0.1", 5.0)
    assert listening(store.port) == ["127.0.0.1"]
    for address in elsewhere():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((address, store.port), timeout=5)
    peer = dist.TCPStore(
        "127.0.0.1", store.port, None, False, timedelta(seconds=5), wait_for_workers=False
    )
    peer.set("a", "1")
    assert store.get("a") == b"1"


@pytest.mark.skipif(not elsewhere(), reason="this machine has loopback alone")
def test_a_bound_store_may_be_for_others() -> None:
    store = bound_store(elsewhere()[0], 5.0)
    # Another program may have the port at another address, so nothing is asked of it.
    assert listening(store.port) == [elsewhere()[0]]


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="address"):
        bound_store("203.0.113.1", 5.0)


def test_a_store_in_a_folder_is_its_owners_and_goes_at_the_end() -> None:
    with FolderStore.made() as store:
        store.under("run").set("a", "1")
        for folder in (store.folder, store.under("run").folder):
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not store.folder.exists()


def stores(tmp_path: Path) -> list[Store]:
    return [FolderStore(tmp_path), dist.HashStore()]


@pytest.mark.parametrize("kind", [0, 1])
def test_a_folder_does_what_torchs_stores_do(tmp_path: Path, kind: int) -> None:
    store = keys_under("rlcore/0", stores(tmp_path)[kind])
    assert not store.check(["a/b"])
    store.set("a/b", "one")
    store.set("a/b", "two")
    assert store.check(["a/b"])
    assert not store.check(["a/b", "c"])
    assert store.get("a/b") == b"two"
    assert store.compare_set("failed", "", "first") == b"first"
    assert store.compare_set("failed", "", "second") == b"first"
    assert store.get("failed") == b"first"
    assert [store.add("n", 1), store.add("n", 2), store.add("n", 0)] == [1, 3, 3]
    assert store.delete_key("a/b")
    assert not store.check(["a/b"])
    assert not keys_under("rlcore/1", stores(tmp_path)[kind]).check(["failed"])


def test_keys_cannot_leave_the_folder(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    store = FolderStore(tmp_path / "store")
    for key in ("../out", "/out", "..", ".lock", "=", "ä/ö"):
        store.set(key, key)
        assert store.get(key) == key.encode()
        store.under(key).set("inner", "1")
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_of_many_that_compare_and_set_one_wins_and_sums_are_whole(tmp_path: Path) -> None:
    gate = threading.Barrier(8)

    def race(one: int) -> bytes:
        store = FolderStore(tmp_path)
        gate.wait(30)
        for _ in range(25):
            store.add("n", 1)
        return store.compare_set("failed", "", str(one))

    with ThreadPoolExecutor(8) as threads:
        winners = set(threads.map(race, range(8)))
    assert len(winners) == 1
    assert FolderStore(tmp_path).get("n") == b"200"


def test_a_store_whose_folder_is_gone_raises_what_torchs_stores_raise(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "gone")
    with pytest.raises(dist.DistError, match="the run's store cannot be used"):
        store.set("a", "1")
    with pytest.raises(dist.DistError):
        store.get("a")
    assert not store.check(["a"])


# --- how the ranks of a group find each other -----------------------------------------------------


class CountingStore(dist.Store):
    """A store that counts the requests which a gloo group makes, and the bytes that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = dist.HashStore()
        self.requests = 0
        self.sizes: dict[str, int] = {}  # bytes by key

    def set(self, key: str, value: bytes) -> None:
        self.requests += 1
        self.sizes[key] = len(value)
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.requests += 1
        return self.inner.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.requests += 1
        return self.inner.multi_get(keys)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.requests += 1
        self.inner.wait(keys, *timeout)

    def has_extended_api(self) -> bool:
        return True


def meet(world: int, timeout_s: float = 20.0) -> CountingStore:
    """Let threads stand for the ranks of a gloo group, which then adds up its ranks."""
    store = CountingStore()
    sums = [torch.tensor(float(rank)) for rank in range(world)]

    def join(rank: int) -> None:
        group = dist.ProcessGroupGloo(store, rank, world, timedelta(seconds=timeout_s))
        group.allreduce([sums[rank]]).wait()

    with ThreadPoolExecutor(world) as threads:
        list(threads.map(join, range(world)))
    assert [total.item() for total in sums] == [world * (world - 1) / 2] * world
    return store


def test_ranks_of_a_group_ask_their_store_in_proportion_to_their_number() -> None:
    with few_store_requests():
        few, many = meet(4), meet(16)
    assert few.requests == 4 * 2  # an address told, all addresses asked for
    assert many.requests == 16 * 2
    assert len(many.sizes) == 16
    assert max(few.sizes.values()) == max(many.sizes.values())  # one address, whatever the world
    assert meet(16).requests > 16 * 16  # as gloo does by itself


def test_outside_no_group_meets_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_ENABLE_STORE_V2_API", "False")
    monkeypatch.delenv("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", raising=False)
    before = dict(os.environ)
    with few_store_requests():
        assert os.environ["GLOO_ENABLE_STORE_V2_API"] == "1"
    assert dict(os.environ) == before

    @few_store_requests()
    def fail() -> None:
        raise ValueError("full")

    with pytest.raises(ValueError, match="full"):
        fail()
    assert dict(os.environ) == before
