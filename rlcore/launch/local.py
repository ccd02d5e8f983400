"""Starts and supervises several trainer processes on this machine, in torchrun's environment.

The first process that dies or falls silent ends the run. The others are notified, and leave or are
ended within a deadline. The user sees the rank that failed and the last lines of its log.

torch's elastic agent cannot replace this module: it detects no hangs, ends all ranks as soon as one
has failed, kills a rank 30 s after SIGTERM although a step and a checkpoint take longer, and takes
exit code 130 for a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rlcore.config import Config
from rlcore.config.load import Loaded
from rlcore.config.secrets import mask_arguments
from rlcore.deadlines import END_RANK_S, LEAVE_S, REPORT_GRACE_S, STACKS_S
from rlcore.errors import BAD_INPUT, INTERRUPTED, RunFailed
from rlcore.launch.environment import (
    INTERFACE,
    RESOLVED,
    STORE_FOLDER,
    SUPERVISED,
    THREADS,
    rank_environment,
    store_prefix,
)
from rlcore.launch.heartbeat import HeartbeatMonitor, raise_if_stuck
from rlcore.launch.logs import LAST_LINES, LAST_LINES_OF_A_STACK, describe_failure, rank_log_path
from rlcore.launch.run_folder import conclude_unless_written, result_mark, was_opened
from rlcore.launch.signals import handling_stop_signals
from rlcore.stores import FolderStore, loopback_interface
from rlcore.trainer.rank_sync import Failure, post_failure, read_failure

POLL_S = 0.1


def launch_ranks(loaded: Loaded, arguments: Sequence[str]) -> int:
    """Run `python -m rlcore ARGUMENTS` for every rank, and return the exit code of the run.

    The ranks use `loaded` without checking it again.

    Raises:
        RunFailed: a process died or hung; names its rank and shows its log's last lines.
    """
    with FolderStore.made() as store:
        (store.folder / RESOLVED).write_text(loaded.to_json())
        ranks = _LocalRanks(loaded.config, store)
        # Signals are handled until all ranks have ended, so a second signal leaves no process
        # behind.
        with handling_stop_signals(ranks.pass_on):
            try:
                ranks.start(arguments)
                failure = ranks.wait()
                if failure is not None:
                    ranks.wait_for_peers(failure)
            finally:
                ranks.end()
        if failure is None:
            return INTERRUPTED if INTERRUPTED in ranks.codes else 0
        return ranks.report(failure)


class _LocalRanks:
    """The processes of all ranks, and the store through which they find each other."""

    def __init__(self, config: Config, store: FolderStore) -> None:
        self.config = config
        self.count = config.cluster.processes_per_node
        self._earlier = result_mark(config)
        self._shared = store
        self.store = self._shared.under(store_prefix())
        self._monitor = HeartbeatMonitor(self.store, range(self.count), config.cluster)
        self.lines = LAST_LINES
        self.workers: list[subprocess.Popen[bytes]] = []
        # The newest signal that was passed on.
        self._signal = 0

    def start(self, arguments: Sequence[str]) -> None:
        for rank in range(self.count):
            worker = _start(rank, self.count, self._shared.folder, self.config, arguments)
            self.workers.append(worker)
            # The signal came before this rank was started.
            if self._signal:
                worker.send_signal(self._signal)

    def pass_on(self, number: int, _frame: object) -> None:
        """Pass a signal on to every worker; `wait` still waits until they have ended."""
        self._signal = number
        for worker in self.workers:
            if worker.poll() is None:
                worker.send_signal(number)

    def wait(self) -> Failure | None:
        """Wait until all ranks have ended, or return a failure, which ends the run, at once."""
        while True:
            codes = [worker.poll() for worker in self.workers]
            failure = read_failure(self.store) or self._died(codes) or self._fell_silent(codes)
            if failure is not None:
                # This notifies the other ranks.
                post_failure(self.store, failure)
                return failure
            if None not in codes:
                return None
            time.sleep(POLL_S)

    def wait_for_peers(self, failure: Failure) -> None:
        """Give the ranks, which know of the failure, time to clean up and leave.

        A hanging rank writes its stacks and is killed.
        """
        culprit = self.workers[failure.rank]
        deadline = time.monotonic() + REPORT_GRACE_S + LEAVE_S
        while time.monotonic() < deadline and any(worker.poll() is None for worker in self.workers):
            silent_s = self._monitor.silence().get(failure.rank, 0.0)
            if culprit.poll() is None and silent_s > self.config.cluster.heartbeat_timeout_s:
                self._dump_stacks(failure.rank)
                culprit.kill()
            time.sleep(POLL_S)

    @property
    def codes(self) -> list[int | None]:
        return [worker.returncode for worker in self.workers]

    def report(self, failure: Failure) -> int:
        """Return the exit code if rank 0, which has the terminal, has printed the reason.

        Raises:
            RunFailed: rank 0 has not printed the reason.
        """
        code_of_rank0 = self.codes[0]
        if code_of_rank0 in (BAD_INPUT, INTERRUPTED):
            return int(code_of_rank0)
        if (
            self._signal
            and self.codes[failure.rank] == -self._signal
            and not was_opened(self.store)
        ):
            # A rank that does not handle signals yet was killed by the user's signal.
            return INTERRUPTED
        if was_opened(self.store):
            conclude_unless_written(self.config, "failed", str(failure), earlier=self._earlier)
        raise_if_stuck(self.store, failure, self.config.run)
        if failure.rank == 0 and code_of_rank0 is not None and code_of_rank0 > 0:
            return code_of_rank0
        raise RunFailed(describe_failure(failure, self.config.run, lines=self.lines))

    def end(self) -> None:
        """End the remaining ranks by SIGTERM and then SIGKILL."""
        for worker in self.workers:
            if worker.poll() is None:
                worker.terminate()
        deadline = time.monotonic() + END_RANK_S
        for worker in self.workers:
            try:
                worker.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait(timeout=END_RANK_S)

    def _died(self, codes: Sequence[int | None]) -> Failure | None:
        """Return the failure of a rank that was killed, or that ended without posting its error."""
        for rank, code in enumerate(codes):
            if code is not None and code < 0:
                return Failure(rank, f"it was killed by {signal.Signals(-code).name}")
        for rank, code in enumerate(codes):
            if code not in (None, 0, INTERRUPTED):
                return Failure(rank, f"it ended with exit code {code}", bad_input=code == BAD_INPUT)
        return None

    def _fell_silent(self, codes: Sequence[int | None]) -> Failure | None:
        failure = self._monitor.failure()
        return failure if failure is not None and codes[failure.rank] is None else None

    def _dump_stacks(self, rank: int) -> None:
        """Make a silent process write the stack of every thread.

        Its fault handler works even if the interpreter is stuck.
        """
        if rank_log_path(self.config.run, rank).exists():
            self.workers[rank].send_signal(signal.SIGUSR1)
            self.lines = LAST_LINES_OF_A_STACK
            time.sleep(STACKS_S)


def _start(
    rank: int, count: int, store: Path, config: Config, arguments: Sequence[str]
) -> subprocess.Popen[bytes]:
    given = config.run.threads or os.environ.get(THREADS)
    threads = given or max(1, (os.cpu_count() or 1) // count)
    ours = rank_environment(rank, count, local_rank=rank, local_world_size=count)
    ours |= {
        STORE_FOLDER: str(store),
        RESOLVED: str(store / RESOLVED),
        SUPERVISED: str(os.getpid()),
        THREADS: str(threads),
        INTERFACE: os.environ.get(INTERFACE, loopback_interface()),
    }
    # In its own session a rank gets no Ctrl-C from the terminal; this process passes it on once.
    return subprocess.Popen(
        [sys.executable, "-m", "rlcore", *mask_arguments(arguments)],
        env=os.environ | ours,
        start_new_session=True,
    )
