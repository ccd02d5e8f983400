"""Carries calls of rank 0's client to its child, which is made anew when it dies or hangs."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from rlcore.boundary.child_environment import service_environment
from rlcore.config import Config
from rlcore.deadlines import CLOSE_SERVICE_S, END_RANK_S, SERVICE_ANSWER_S
from rlcore.errors import DeadlineExceeded, RunFailed
from rlcore.launch.service import frames
from rlcore.launch.service.channel import ServiceLost
from rlcore.launch.service.child import LINE, Begin
from rlcore.launch.service.silence import await_silence
from rlcore.terminal import printable

MODULE = "rlcore.launch.service.child"
MOST_STARTS = 6  # of the process, in one run
logger = logging.getLogger(__name__)


class Child:
    """One process of the service. It imports from the beginning, and waits for `Begin`."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        limit = struct.pack("ll", int(SERVICE_ANSWER_S), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sending = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lost: ServiceLost | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_up = threading.Event()
        self._ended = threading.Event()
        # Linux ends the process with the *thread* that made it: this one lives as long.
        threading.Thread(target=self._run, args=(theirs,), name="service", daemon=True).start()
        self._is_up.wait(END_RANK_S)

    @property
    def pid(self) -> int | None:
        """The number of the process; None where it could not be made."""
        return None if self._process is None else self._process.pid

    @property
    def lost(self) -> bool:
        """Whether its process is gone."""
        return self._lost is not None

    def begin(self, message: Begin) -> None:
        """Send the first message; a child that is gone shows that at the next call."""
        self._send(message)
        limit_s = message.config.cluster.heartbeat_timeout_s
        threading.Thread(
            target=self._end_if_silent, args=(limit_s,), name="service's beat", daemon=True
        ).start()

    def call(self, part: str, given: tuple[Any, ...], named: dict[str, Any]) -> Future[Any]:
        """Begin a call; its future fails with ServiceLost when the process dies."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # whoever stops waiting does not cancel it
        number = next(self._numbers)
        self._calls[number] = future
        self._send((number, part, given, named))
        if self._lost is not None:
            self._fail_calls(self._lost)
        return future

    def end(self, *, wait_s: float) -> None:
        """Close the socket, which ends the process, and kill it where that is not enough."""
        if self._process is None:
            return
        if not self._ended.wait(wait_s):
            self._shut()
            if not self._ended.wait(END_RANK_S):
                logger.warning("the rollout service does not end, and is killed")
                self._process.kill()
                self._ended.wait(END_RANK_S)

    def _end_if_silent(self, limit_s: float) -> None:
        silent_s = await_silence(lambda: self.call("beat", (), {}), self._ended, limit_s=limit_s)
        if silent_s is not None and self._process is not None:
            logger.warning(
                "the rollout service was silent for %.0f s (cluster.heartbeat_timeout_s): it is"
                " made anew",
                silent_s,
            )
            self._process.kill()

    def _send(self, message: Any) -> None:
        parts = frames.encode(message)
        try:
            with self._sending:
                frames.send(self._socket, parts)
        # recovery: the reader finds the end of the socket, and fails the calls
        except OSError as error:
            logger.info("a call of the rollout service could not be sent: %s", error)
            self._shut()

    def _shut(self) -> None:
        with suppress(OSError):  # it is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    # --- the thread of the process ----------------------------------------------------------------

    def _run(self, theirs: socket.socket) -> None:
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=service_environment(),
                    start_new_session=True,  # Ctrl-C is for rank 0
                )
            except OSError as error:
                self._fail_calls(ServiceLost(f"the rollout service cannot be started: {error}"))
        self._is_up.set()
        if self._process is None:
            return
        # A process that the service left behind may keep the socket open.
        threading.Thread(target=self._watch, name="service's end", daemon=True).start()
        why = self._read()
        self._shut()  # which ends a process that still runs
        try:
            code = self._process.wait(END_RANK_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._fail_calls(
            ServiceLost(f"the rollout service: its process is gone ({why}, exit code {code})")
        )
        self._ended.set()
        self._socket.close()

    def _watch(self) -> None:
        assert self._process is not None
        self._process.wait()
        self._shut()

    def _read(self) -> str:
        """Give answers to the calls until the process is gone; return why."""
        try:
            while True:
                number, found = frames.receive(self._socket)
                if number == LINE:
                    _print(*found)
                elif (future := self._calls.pop(number, None)) is not None:
                    good, value = found
                    future.set_result(value) if good else future.set_exception(value)
        except (EOFError, OSError, TypeError, ValueError) as error:
            return str(error)

    def _fail_calls(self, why: ServiceLost) -> None:
        self._lost = why
        for number in list(self._calls):
            if (future := self._calls.pop(number, None)) is not None:
                future.set_exception(why)


class ChildChannel:
    """Implements `rlcore.launch.service.channel.Channel`.

    The first process begins at once, so that it imports while rank 0 joins the others.
    """

    def __init__(self) -> None:
        self._child = Child()
        self._starts = 1
        self._begin: tuple[Config, int] | None = None
        self._begun: Child | None = None  # the process that has been told the configuration

    @property
    def pid(self) -> int | None:
        """The number of the newest process."""
        return self._child.pid

    def begin(self, config: Config, world_size: int) -> None:
        """Say what the service is opened with."""
        self._begin = config, world_size

    def send(self, part: str, *arguments: Any) -> Future[Any]:
        """Implements the protocol."""
        return self._child.call(part, arguments, {})

    def get(self, call: Future[Any], *, limit_s: float, what: str, key: str) -> Any:
        """Implements the protocol."""
        if not wait([call], timeout=limit_s).done:
            raise DeadlineExceeded(f"{what}: no answer within {limit_s:g} s ({key})")
        return call.result()

    async def answer(self, call: Future[Any], *, what: str) -> Any:
        """Implements the protocol."""
        return await asyncio.wrap_future(call)

    def open(self, *, greedy_baseline: bool, limit_s: float, what: str, key: str) -> Any:
        """Implements the protocol. Raises RunFailed after MOST_STARTS of the process."""
        while True:
            if self._child.lost:
                self._start_again()
            if self._begun is not self._child:
                self._child.begin(self._first_message())
                self._begun = self._child
            call = self._child.call("open", (), {"greedy_baseline": greedy_baseline})
            try:
                return self.get(call, limit_s=limit_s, what=what, key=key)
            # recovery: another process, as often as it may be started
            except ServiceLost as error:
                logger.warning("%s", error)

    def close(self) -> None:
        """End the service, its engines and its process, within a limit; may be called twice."""
        child = self._child
        if self._begun is child and not child.lost:
            closing = child.call("close", (), {})
            wait([closing], timeout=CLOSE_SERVICE_S)
        child.end(wait_s=END_RANK_S if self._begun is child else 0.0)

    def _start_again(self) -> None:
        if self._starts >= MOST_STARTS:
            raise RunFailed(
                f"the rollout service died {self._starts} times in this run: see logs/service.log"
            )
        self._starts += 1
        logger.warning("the rollout service died: another process takes its place")
        self._child = Child()

    def _first_message(self) -> Begin:
        assert self._begin is not None, "begin comes first"
        config, world_size = self._begin
        return Begin(config, world_size, self._starts > 1, list(sys.path), os.getcwd())


def _print(stream: str, line: str) -> None:
    """Print a line of the service on this process's terminal."""
    print(printable(line), end="", file=sys.stdout if stream == "out" else sys.stderr, flush=True)
