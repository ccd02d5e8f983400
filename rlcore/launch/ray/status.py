"""The actor that a run's driver, its rank 0 and other shells share, and its callers.

`rlcore status` reads the facts of the run from it, `rlcore stop` requests the end of the run, and
rank 0 sends it the lines that the driver prints.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from rlcore.deadlines import STATUS_ANSWER_S
from rlcore.errors import DeadlineExceeded, RlcoreError, RunFailed, UserError
from rlcore.launch.logs import LineStream
from rlcore.launch.ray.calls import NAMESPACE, actor_name, get
from rlcore.launch.ray.cluster import LOCAL, find_cluster, join
from rlcore.launch.run_folder import engine_lines
from rlcore.launch.signals import handling_stop_signals
from rlcore.runs.directory import RunDirectory
from rlcore.runs.metrics import read_metrics
from rlcore.terminal import printable

POLL_S = 0.5
MAX_LINE = 1 << 16  # characters of a printed line
logger = logging.getLogger(__name__)


# --- commands -------------------------------------------------------------------------------------


def status(address: str | None) -> Iterator[str]:
    """Yield lines on every run of the cluster, its processes and engines.

    Raises UserError if there is no cluster.
    """
    with _connected(address):
        runs = _runs()
        if not runs:
            yield "no run is running"
        for run in runs:
            yield from _describe(run)


def stop(run: str, address: str | None, *, timeout_s: float) -> str:
    """Request a clean end of a run after its current step, and wait; return a line to print.

    A second request ends the run at once.

    Raises:
        UserError: there is no such run, or no cluster.
        DeadlineExceeded: the run has not ended after `timeout_s`.
    """
    with _connected(address):
        try:
            run_status = status_of(run)
        except ValueError as error:
            there = ", ".join(_runs()) or "none"
            raise UserError(f"no run {run!r} is running here; there is {there}") from error
        _get(run_status.stop.remote(), f"run {run}")
        deadline = time.monotonic() + timeout_s
        while run in _runs():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"run {run} was asked to stop and is still running after"
                    f" {timeout_s:g} s (--timeout): its current step may take longer, and the run"
                    " ends after it; a second `rlcore stop` ends it at once, without a checkpoint"
                )
            time.sleep(POLL_S)
    return f"run {run} has ended: continue it with --resume"


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    found = address or find_cluster()
    if found is None or found == LOCAL:
        raise UserError("no Ray cluster of yours runs on this machine (--address HOST:PORT)")
    try:
        join(found)
    except ConnectionError as error:
        raise UserError(f"no Ray cluster at {found!r} (--address HOST:PORT): {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _runs() -> list[str]:
    """Return the names of all runs on the cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    return [name.removesuffix("/status") for name in names if name.endswith("/status")]


def _describe(run: str) -> Iterator[str]:
    try:
        facts: dict[str, Any] = _get(status_of(run).read.remote(), f"run {run}")
    except (RlcoreError, ValueError):
        # The run has ended meanwhile.
        return
    folder = Path(facts["folder"])
    # This machine may lack the file.
    metrics = RunDirectory(folder).metrics_path
    rows = read_metrics(metrics) if metrics.is_file() else []
    step = rows[-1]["step"] if rows else 0
    yield f"{run}: step {step}, for {time.time() - facts['began']:.0f} s, in {folder}"
    yield f"  restarts of the ranks: {facts['restarts']}"
    if not facts["ranks"]:
        yield "  ranks: being started"
    for rank in facts["ranks"]:
        gpus = f", GPU {', '.join(rank['gpus'])}" if rank["gpus"] else ""
        yield f"  rank {rank['rank']}: pid {rank['pid']} on node {rank['node'][:12]}{gpus}"
    for line in engine_lines(folder):
        yield f"  {line}"


# --- the actor ------------------------------------------------------------------------------------


class RunStatus:
    """The actor. It handles one call at a time, and the calls of one caller in order."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._stops = 0
        self._lines: list[tuple[str, str]] = []

    def write(self, facts: dict[str, Any]) -> None:
        """Replace the facts."""
        self._facts = facts

    def read(self) -> dict[str, Any]:
        """Return all facts."""
        return self._facts

    def stop(self) -> None:
        """Request a clean end after the current step; a second request ends the run at once."""
        self._stops += 1

    def say(self, stream: str, line: str) -> None:
        """Keep a line for the driver to print on `stream`, "out" or "err"."""
        self._lines.append((stream, line))

    def news(self) -> tuple[int, list[tuple[str, str]]]:
        """Return how often `stop` was called so far, and the lines since the last call."""
        lines = self._lines
        self._lines = []
        return self._stops, lines


def status_of(run: str) -> Any:
    """Find the status actor of a run. Raises ValueError if there is none."""
    return ray.get_actor(actor_name(run, "status"), namespace=NAMESPACE)


def _get(call: Any, what: str) -> Any:
    return get(call, limit_s=STATUS_ANSWER_S, what=what, key="a fixed limit")


def print_on_driver(run: str) -> None:
    """Send the output of this process to the driver's terminal from now on."""
    run_status = status_of(run)

    def send(stream: str, line: str) -> None:
        try:
            _get(run_status.say.remote(stream, line[:MAX_LINE]), "the driver")
        except RunFailed:
            # No recovery is possible: the terminal is gone with the driver.
            logger.info("not printed: %s", line.rstrip())

    sys.stdout = LineStream(lambda line: send("out", line))
    sys.stderr = LineStream(lambda line: send("err", line))


class Requests:
    """In the driver: prints the lines of rank 0, and counts requests to end the run.

    Requests are signals to this process and calls of `rlcore stop`. The first requests a clean end
    after this step, the second ends the run at once.
    """

    def __init__(self) -> None:
        self._signals = 0
        self._stops = 0
        self._interrupts = False
        self._run_status: Any = None
        # The pending call; empty once the actor is lost.
        self._news: list[Any] = []

    @property
    def count(self) -> int:
        """The number of requests so far."""
        return self._signals + self._stops

    @contextmanager
    def counting_signals(self) -> Iterator[None]:
        """Only count signals while open, so that they do not interrupt the cleanup."""

        def count(_number: int, _frame: object) -> None:
            self._signals += 1
            if self._interrupts and self.count > 1:
                raise KeyboardInterrupt

        with handling_stop_signals(count):
            yield

    @contextmanager
    def interrupting_on_second(self) -> Iterator[None]:
        """Make a second signal raise KeyboardInterrupt in the main thread while open."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def follow(self, run_status: Any) -> None:
        """Fetch lines and requests from this actor from now on."""
        self._run_status = run_status
        self._news = [run_status.news.remote()]

    def check(self) -> None:
        """Fetch the actor's lines and requests, without waiting."""
        if self._news and ray.wait(self._news, timeout=0)[0]:
            self._take()

    def finish(self) -> None:
        """Print the remaining lines, once rank 0 has ended."""
        # The pending call may have been answered before the last line came.
        for _ in range(2):
            if self._news:
                self._take()

    def _take(self) -> None:
        try:
            self._stops, lines = ray.get(self._news[0], timeout=STATUS_ANSWER_S)
        except RayError:
            # The actor is lost, and `rlcore stop` with it.
            self._news = []
            return
        self._news = [self._run_status.news.remote()]
        for stream, line in lines:
            file = sys.stdout if stream == "out" else sys.stderr
            print(printable(line), end="", file=file, flush=True)
