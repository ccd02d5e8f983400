"""Several trainer processes on this machine, started and watched by us with the environment that
torchrun gives.

The first process that dies or falls silent ends the run: the others are told why, leave or are
    ended within a deadline, and
the culprit's rank and the last lines of its log are what the user sees.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from rlcore.config import Config
from rlcore.errors import BAD_INPUT, INTERRUPTED, RunFailed
from rlcore.launch.heartbeat import LEAVE_S, NOTICE_S, HeartbeatMonitor, came_late, read_stuck
from rlcore.launch.logs import LAST_LINES, LAST_LINES_OF_A_STACK, describe, folder_of, path_of
from rlcore.launch.environment import SUPERVISED, store_prefix
from rlcore.launch.run_folder import conclude_for, was_opened
from rlcore.launch.signals import hearing
from rlcore.trainer.rank_sync import Failure, post_failure, read_failure

POLL_S = 0.1
DUMP_S = 1.0  # for a stuck process to write its stacks
END_S = 10.0  # from SIGTERM to SIGKILL, where we are the ones who end it


def supervise(config: Config, arguments: Sequence[str]) -> int:
    """Run `python -m rlcore ARGUMENTS` once a rank. The exit code of the run.

    Raises:
        RunFailed: a process died or hung; names its rank and shows its log's last lines.
    """
    ranks = _Ranks(config)
    # to their very end: a second signal shall leave nobody behind
    with hearing(ranks.pass_on):
        try:
            ranks.start(arguments)
            failure = ranks.wait()
            if failure is not None:
                ranks.wait_for_the_others(failure)
        finally:
            ranks.end()
    if failure is None:
        return INTERRUPTED if INTERRUPTED in ranks.codes else 0
    return ranks.report(failure)


class _Ranks:
    """The processes, and the store in which they meet."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.count = config.cluster.processes_per_node
        self._began = time.time()
        self._host = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self.store = dist.PrefixStore(store_prefix(), self._host)
        cluster = config.cluster
        self._watch = HeartbeatMonitor(
            self.store,
            range(self.count),
            limit_s=cluster.heartbeat_timeout_s,
            start_limit_s=cluster.start_timeout_s,
        )
        self.lines = LAST_LINES
        self.workers: list[subprocess.Popen[bytes]] = []
        self._passed_on = 0  # the last signal that came while they ran

    def start(self, arguments: Sequence[str]) -> None:
        for rank in range(self.count):
            self.workers.append(
                worker := _start(rank, self.count, self._host.port, self.config, arguments)
            )
            if self._passed_on:
                worker.send_signal(self._passed_on)  # it was not there yet

    def pass_on(self, number: int, _frame: object) -> None:
        """SIGTERM and Ctrl-C go to every worker, and we wait for their end."""
        self._passed_on = number
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(number)

    def wait(self) -> Failure | None:
        """Until all have ended well, or for what ends the run."""
        while True:
            codes = [worker.poll() for worker in self.workers]
            failure = read_failure(self.store) or self._died(codes) or self._fell_silent(codes)
            if failure is not None:
                post_failure(self.store, failure)  # the others are told
                return failure
            if None not in codes:
                return None
            time.sleep(POLL_S)

    def wait_for_the_others(self, failure: Failure) -> None:
        """They know of the failure: they close what is open and leave, or end themselves. One that
        is stopped does neither.
        """
        culprit = self.workers[failure.rank]
        deadline = time.monotonic() + NOTICE_S + LEAVE_S
        while time.monotonic() < deadline and any(worker.poll() is None for worker in self.workers):
            silent_s = self._watch.silence().get(failure.rank, 0.0)
            if culprit.poll() is None and silent_s > self.config.cluster.heartbeat_timeout_s:
                self._dump_stacks(failure.rank)
                culprit.kill()
            time.sleep(POLL_S)

    @property
    def codes(self) -> list[int | None]:
        return [worker.returncode for worker in self.workers]

    def report(self, failure: Failure) -> int:
        """The exit code, where rank 0 has told the user what went wrong: it keeps the terminal.

        Raises:
            RunFailed: it has not.
        """
        speaker = self.codes[0]
        stuck = read_stuck(self.store)
        if speaker in (BAD_INPUT, INTERRUPTED):
            return int(speaker)
        if (
            self._passed_on
            and self.codes[failure.rank] == -self._passed_on
            and not was_opened(self.store)
        ):
            return INTERRUPTED  # a rank that does not heed signals yet dies of them
        conclude_for(self.config, self.store, failure, began=self._began)
        if failure.waited and stuck is not None:
            raise RunFailed(
                describe(came_late(stuck), self.config.run, lines=LAST_LINES_OF_A_STACK)
            )
        if failure.rank == 0 and speaker is not None and speaker > 0:
            return speaker
        raise RunFailed(describe(failure, self.config.run, lines=self.lines))

    def end(self) -> None:
        """SIGTERM asks for a clean end that a rank stuck in a collective cannot give: SIGKILL
        follows.
        """
        for worker in self.workers:
            if worker.poll() is None:
                worker.terminate()
        deadline = time.monotonic() + END_S
        for worker in self.workers:
            try:
                worker.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait(timeout=END_S)

    def _died(self, codes: Sequence[int | None]) -> Failure | None:
        """A process that was killed, or that ended without a word to the others."""
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                return Failure(rank, f"it was killed by {signal.Signals(-code).name}")
        for rank, code in enumerate(codes):
            if code not in (None, 0, INTERRUPTED):
                return Failure(rank, f"it ended with exit code {code}", bad_input=code == BAD_INPUT)
        return None

    def _fell_silent(self, codes: Sequence[int | None]) -> Failure | None:
        failure = self._watch.failure()
        return failure if failure is not None and codes[failure.rank] is None else None

    def _dump_stacks(self, rank: int) -> None:
        """Ask a silent process for the stack of every thread: its fault handler answers where the
        interpreter is stuck.
        """
        if path_of(folder_of(self.config.run), rank).exists():
            self.workers[rank].send_signal(signal.SIGUSR1)
            self.lines = LAST_LINES_OF_A_STACK
            time.sleep(DUMP_S)


def _start(
    rank: int, count: int, port: int, config: Config, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    threads = config.run.threads or max(1, (os.cpu_count() or 1) // count)
    environment = {
        **os.environ,
        SUPERVISED: str(os.getpid()),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is ours: no port is chosen twice
        "OMP_NUM_THREADS": str(threads),
    }
    # A session of its own: a Ctrl-C is ours to pass on, once, like a SIGTERM that only we get.
    return subprocess.Popen(
        [sys.executable, "-m", "rlcore", *arguments], env=environment, start_new_session=True
    )
