"""Several trainer processes on this machine, started and watched by us with the environment that torchrun gives.

The first process that dies or falls silent ends the run: the rest are stopped within a deadline, and the culprit's rank and
the last lines of its log are what the user sees.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from rlcore.config import Config
from rlcore.errors import RunFailed
from rlcore.launch import INTERRUPTED

GRACE_S = 10.0          # from the first death to SIGKILL for the rest
SETTLE_S = 0.5          # in which the peers of a dead process fail too
LAST_LINES = 15
USER_ERROR = 2          # the exit code of a rank that was given bad input


def supervise(config: Config, arguments: Sequence[str]) -> int:
    """Run `python -m rlcore ARGUMENTS` once a rank. The exit code of the run.

    Raises:
        RunFailed: a process died or hung; names its rank and shows its log's last lines.
    """
    count = config.cluster.processes_per_node
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    workers = [_start(rank, count, store.port, config, arguments) for rank in range(count)]
    watch = _Watch(config, store, workers)
    try:
        with _forward_signals(workers):
            culprit = watch.first_failure()
        if culprit is not None:
            return watch.blame(culprit)
        return INTERRUPTED if any(worker.returncode == INTERRUPTED for worker in workers) else 0
    finally:
        _stop(workers)


def _start(rank: int, count: int, port: int, config: Config, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    threads = config.run.threads or max(1, (os.cpu_count() or 1) // count)
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",     # the store is ours: no port is chosen twice
        "OMP_NUM_THREADS": str(threads),
    }
    return subprocess.Popen([sys.executable, "-m", "rlcore", *arguments], env=environment)


class _Watch:
    def __init__(self, config: Config, store: dist.TCPStore, workers: list[subprocess.Popen[bytes]]) -> None:
        self.config, self.store, self.workers = config, store, workers
        self.started = time.time()
        self.silent: int | None = None

    def first_failure(self) -> int | None:
        """The rank that ended the run, None when all ended well."""
        while True:
            codes = [worker.poll() for worker in self.workers]
            failed = [rank for rank, code in enumerate(codes) if code not in (None, 0, INTERRUPTED)]
            if failed:
                return self._culprit(failed[0])
            if None not in codes:
                return None
            self.silent = next((rank for rank, code in enumerate(codes) if code is None and self._is_silent(rank)), None)
            if self.silent is not None:
                return self.silent
            time.sleep(0.2)

    def _culprit(self, first: int) -> int:
        """Who is to be named, when `first` was seen to fail first: its peers fail too, at almost the same time."""
        time.sleep(SETTLE_S)
        killed = [rank for rank, worker in enumerate(self.workers) if (worker.poll() or 0) < 0]
        if killed:
            return killed[0]
        # Bad input ends all ranks, rank 0 last: it has engines to close, and it is the one that tells the user.
        with suppress(subprocess.TimeoutExpired):
            if self.workers[0].wait(timeout=GRACE_S) == USER_ERROR:
                return 0
        return first

    def _is_silent(self, rank: int) -> bool:
        key = f"rlcore/0/beat/{rank}"
        last = float(self.store.get(key)) if self.store.check([key]) else None
        limit = self.config.cluster.heartbeat_timeout_s if last else self.config.cluster.start_timeout_s
        return time.time() - (last or self.started) > limit

    def blame(self, rank: int) -> int:
        code = self.workers[rank].poll()
        if rank == self.silent:
            what = f"has been silent for {self.config.cluster.heartbeat_timeout_s:.0f} s (cluster.heartbeat_timeout_s)"
        elif code is not None and code < 0:
            what = f"was killed by {signal.Signals(-code).name}"
        elif code is not None and rank == 0 and code != 1:
            return code                         # rank 0 has told the user itself (bad input, an interrupt)
        else:
            what = f"exited with code {code}"
        log = Path(self.config.run.dir) / self.config.run.name / "logs" / f"rank_{rank}.log"
        lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
        tail = "".join(f"\n  {line}" for line in lines)
        raise RunFailed(f"trainer rank {rank} {what}; the last lines of {log}:{tail or ' (empty)'}")


class _forward_signals:
    """Ctrl-C reaches the workers by the terminal; SIGTERM is passed on, and we wait for their clean end."""

    def __init__(self, workers: list[subprocess.Popen[bytes]]) -> None:
        self.workers = workers

    def __enter__(self) -> None:
        def forward(number: int, _frame: object) -> None:
            for worker in self.workers:
                if worker.poll() is None:
                    worker.send_signal(number)

        self.previous = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, forward),
            signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        }

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)


def _stop(workers: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM asks for a clean end that a rank stuck in a collective cannot give: SIGKILL follows."""
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    deadline = time.monotonic() + GRACE_S
    for worker in workers:
        try:
            worker.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait(timeout=GRACE_S)
