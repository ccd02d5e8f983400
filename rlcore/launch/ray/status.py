"""`rlcore status` and `rlcore stop RUN`, and what each run has for them: an actor, and a count."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayError

from rlcore.deadlines import STATUS_ANSWER_S
from rlcore.errors import DeadlineExceeded, RlcoreError, UserError
from rlcore.launch.ray.calls import NAMESPACE, actor_name, first_line, get
from rlcore.launch.ray.cluster import NO_TOKEN
from rlcore.launch.ray.discovery import LOCAL, check_reachable, find_cluster
from rlcore.launch.run_folder import engine_lines
from rlcore.launch.signals import handling_stop_signals
from rlcore.runs.directory import RunDirectory
from rlcore.runs.metrics import read_metrics

POLL_S = 0.5
KEY = "a fixed limit"


def status(address: str | None) -> Iterator[str]:
    """Yield lines on every run of the cluster, its processes and engines.

    Raises UserError where there is no cluster.
    """
    with _connected(address):
        runs = _runs()
        if not runs:
            yield "no run goes on"
        for run in runs:
            yield from _describe(run)


def stop(run: str, address: str | None, *, timeout_s: float) -> str:
    """Ask a run for a clean end after its current step, and wait; return a line to print.

    A second request ends the run at once.

    Raises:
        UserError: there is no such run, or no cluster.
        DeadlineExceeded: the run goes on after `timeout_s`.
    """
    with _connected(address):
        try:
            run_status = ray.get_actor(actor_name(run, "status"), namespace=NAMESPACE)
        except ValueError as error:
            there = ", ".join(_runs()) or "none"
            raise UserError(f"no run {run!r} goes on here; there is {there}") from error
        get(run_status.stop.remote(), limit_s=STATUS_ANSWER_S, what=f"run {run}", key=KEY)
        deadline = time.monotonic() + timeout_s
        while run in _runs():
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"run {run} was asked to stop and goes on after {timeout_s:g} s (--timeout):"
                    " its step at hand may take longer, and it ends after that; `rlcore stop` once"
                    " more ends it at once, without a checkpoint"
                )
            time.sleep(POLL_S)
    return f"run {run} has ended: continue it with --resume"


@contextmanager
def _connected(address: str | None) -> Iterator[None]:
    found = address or find_cluster()
    if found in (None, LOCAL):
        raise UserError("no Ray cluster of yours runs on this machine (--address HOST:PORT)")
    try:
        check_reachable(found)
        ray.init(
            address=found,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(
            f"no Ray cluster at {found!r} (--address HOST:PORT): {first_line(error)}"
        ) from error
    except AuthenticationError as error:
        raise UserError(f"the Ray cluster refuses us: {NO_TOKEN}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _runs() -> list[str]:
    """The names of all runs on the cluster."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    names = sorted(actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    return [name.removesuffix("/status") for name in names if name.endswith("/status")]


def _describe(run: str) -> Iterator[str]:
    try:
        run_status = ray.get_actor(actor_name(run, "status"), namespace=NAMESPACE)
        facts: dict[str, Any] = get(
            run_status.read.remote(), limit_s=STATUS_ANSWER_S, what=f"run {run}", key=KEY
        )
    except (RlcoreError, ValueError):  # it has ended meanwhile
        return
    folder = Path(facts["folder"])
    yield f"{run}: step {_step(folder)}, for {time.time() - facts['began']:.0f} s, in {folder}"
    yield f"  restarts of the ranks: {facts.get('restarts', 0)}"
    if not facts["ranks"]:
        yield "  ranks: being started"
    for rank in facts["ranks"]:
        gpus = f", GPU {', '.join(rank['gpus'])}" if rank["gpus"] else ""
        yield f"  rank {rank['rank']}: pid {rank['pid']} on node {rank['node'][:12]}{gpus}"
    for line in engine_lines(folder):
        yield f"  {line}"


def _step(folder: Path) -> str:
    """The last step in metrics.jsonl, if this machine has that file."""
    path = RunDirectory(folder).metrics_path
    rows = read_metrics(path) if path.is_file() else []
    return str(rows[-1]["step"]) if rows else "0"


class RunStatus:
    """The actor in which a run's driver writes for `rlcore status`, and hears `rlcore stop`."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._written = 0  # the number of the newest facts
        self._stops = 0
        self._asked = asyncio.Condition()

    async def write(self, number: int, facts: dict[str, Any]) -> None:
        """Replace the facts, unless newer ones came first: Ray keeps no order of a start's calls.

        Args:
            number: rises with each call of the driver.
        """
        if number > self._written:
            self._written = number
            self._facts = facts

    async def read(self) -> dict[str, Any]:
        """All facts."""
        return self._facts

    async def stop(self) -> None:
        """Ask for a clean end after the current step; a second request ends the run at once."""
        async with self._asked:
            self._stops += 1
            self._asked.notify_all()

    async def until_stop(self, times: int) -> None:
        """Return when the run has been asked to stop so many times."""
        async with self._asked:
            await self._asked.wait_for(lambda: self._stops >= times)


class StopRequests:
    """Counts requests to end a run: signals of the driver's process, and `rlcore stop`.

    The first asks for a clean end after this step, the second ends it at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._interrupts = False
        self._run_status: Any = None
        self._stops = 0  # requests in `count` that came from the run status
        # The call that returns when the run status has one more; none once that actor is lost.
        self._next_stop: list[Any] = []

    @contextmanager
    def counting_signals(self) -> Iterator[None]:
        """Only count signals while open, so that they do not interrupt what is being closed."""

        def count(_number: int, _frame: object) -> None:
            self.count += 1
            if self._interrupts and self.count > 1:
                raise KeyboardInterrupt

        with handling_stop_signals(count):
            yield

    @contextmanager
    def interrupting_on_second(self) -> Iterator[None]:
        """Let a second signal raise KeyboardInterrupt in the main thread while open."""
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    def follow(self, run_status: Any) -> None:
        """Count the requests that `rlcore stop` makes at this actor."""
        self._run_status = run_status
        self._await_stop()

    def check(self) -> None:
        """Count a new request of the run status; never waits."""
        if not self._next_stop or not ray.wait(self._next_stop, timeout=0)[0]:
            return
        try:
            ray.get(self._next_stop)
        except RayError:  # the actor is lost, and `rlcore stop` with it
            self._next_stop = []
            return
        self.count += 1
        self._stops += 1
        self._await_stop()

    def _await_stop(self) -> None:
        self._next_stop = [self._run_status.until_stop.remote(self._stops + 1)]
