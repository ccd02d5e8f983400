"""How the ranks of a gloo group find each other: requests, bytes and seconds, by their number.

    python benchmarks/startup.py                # 16, 32, 64 and 128 ranks
    python benchmarks/startup.py --ranks 8 16

Threads stand for ranks. They make one group over a TCPStore of this process, as gloo does by itself
and as a run does (`rlcore.stores.few_store_requests`), alternately; medians of the rounds. Each
pair of ranks has a connection, so 128 ranks take 16,256 sockets of this process.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta

import torch.distributed as dist
from report import machine

from rlcore.launch.environment import allow_connections
from rlcore.stores import few_store_requests

LIMIT = timedelta(seconds=300)
ROUNDS = 3


class CountingStore(dist.Store):
    """One rank's connection to the store, which counts what passes it."""

    def __init__(self, inner: dist.Store) -> None:
        super().__init__()
        self.inner = inner
        self.requests = 0
        self.bytes = 0

    def set(self, key: str, value: bytes) -> None:
        """Count a value that is told."""
        self.requests += 1
        self.bytes += len(value)
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Count a value that is asked for."""
        self.requests += 1
        value = self.inner.get(key)
        self.bytes += len(value)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Count values that are asked for at once."""
        self.requests += 1
        values = self.inner.multi_get(keys)
        self.bytes += sum(map(len, values))
        return values

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        """Count a wait for keys."""
        self.requests += 1
        self.inner.wait(keys, LIMIT)

    def has_extended_api(self) -> bool:
        """Tell gloo that many keys can be asked for at once."""
        return True


def meet(world: int, how: Callable[[], AbstractContextManager[None]]) -> tuple[float, int, int]:
    """Make a group of `world` ranks: its seconds, and the store's requests and bytes."""
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
    stores = [
        CountingStore(dist.TCPStore("127.0.0.1", host.port, timeout=LIMIT, wait_for_workers=False))
        for _ in range(world)
    ]
    at_once = threading.Barrier(world + 1)

    def join(rank: int) -> dist.ProcessGroupGloo:
        at_once.wait()
        return dist.ProcessGroupGloo(stores[rank], rank, world, LIMIT)

    with how(), ThreadPoolExecutor(world) as threads:
        groups = [threads.submit(join, rank) for rank in range(world)]
        at_once.wait()
        began = time.perf_counter()
        for group in groups:
            group.result()
        seconds = time.perf_counter() - began
    return seconds, sum(s.requests for s in stores), sum(s.bytes for s in stores)


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    allow_connections(max(given.ranks) ** 2)
    print(machine())
    print("| ranks | gloo by itself: requests, MB, s | as a run does: requests, MB, s |")
    print("|---:|---:|---:|")
    for world in given.ranks:
        rounds: dict[str, list[tuple[float, int, int]]] = {"alone": [], "run": []}
        for _ in range(given.rounds):
            rounds["alone"].append(meet(world, nullcontext))
            rounds["run"].append(meet(world, few_store_requests))
        cells = [
            f"{found[0][1]:,}, {found[0][2] / 1e6:.2f},"
            f" {statistics.median(seconds for seconds, _, _ in found):.2f}"
            for found in rounds.values()
        ]
        print(f"| {world} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
