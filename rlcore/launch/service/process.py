"""A process of the rollout service, as rank 0 uses it: calls, and the end of the process."""

from __future__ import annotations

import itertools
import logging
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from rlcore.boundary.child_environment import service_environment
from rlcore.deadlines import END_RANK_S, SERVICE_ANSWER_S, STALL_S
from rlcore.errors import PartLost
from rlcore.launch.service import frames
from rlcore.launch.service.frames import LINE, Begin
from rlcore.terminal import printable

MODULE = "rlcore.launch.service.child"
BEAT_S = 1.0
LOOK_S = 0.5
logger = logging.getLogger(__name__)


class ServiceLost(PartLost):
    """The process of the service died; its replacement has no state."""


class ServiceProcess:
    """A child process with the service. It imports at once, and then waits for `Begin`.

    Args:
        on_ray: the service uses a Ray cluster.
    """

    def __init__(self, *, on_ray: bool = False) -> None:
        self._socket, theirs = socket.socketpair()
        limit = struct.pack("ll", int(SERVICE_ANSWER_S), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sending = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lost: ServiceLost | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment = service_environment(on_ray=on_ray)
        self._is_up = threading.Event()
        self._ended = threading.Event()
        # Linux ends the child with the *thread* that made it, so this thread lives as long.
        threading.Thread(target=self._run, args=(theirs,), name="service", daemon=True).start()
        self._is_up.wait(END_RANK_S)

    @property
    def pid(self) -> int | None:
        """The process id; None if the process could not be started."""
        return None if self._process is None else self._process.pid

    @property
    def lost(self) -> bool:
        """Whether the process is gone."""
        return self._lost is not None

    def begin(self, message: Begin) -> None:
        """Send the first message; if the process is gone, the next call fails."""
        self._send(message)
        limit_s = message.config.cluster.heartbeat_timeout_s
        threading.Thread(
            target=self._end_if_silent, args=(limit_s,), name="service's beat", daemon=True
        ).start()

    def call(self, part: str, *arguments: Any) -> Future[Any]:
        """Begin a call; its future fails with ServiceLost when the process dies."""
        future: Future[Any] = Future()
        # A caller that stops waiting does not cancel the call.
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        self._calls[number] = future
        self._send((number, part, arguments))
        if self._lost is not None:
            self._fail_calls(self._lost)
        return future

    def end(self, *, wait_s: float) -> None:
        """Close the socket, which ends the process; kill a process that remains."""
        if self._process is None or self._ended.wait(wait_s):
            return
        self._shut()
        if not self._ended.wait(END_RANK_S):
            logger.warning("the rollout service does not end and is killed")
            self._process.kill()
            self._ended.wait(END_RANK_S)

    def _end_if_silent(self, limit_s: float) -> None:
        """Kill a process that answers no beat for `limit_s`.

        The time before the first answer does not count, as the start has its own deadline; nor does
        time in which this process was suspended.
        """
        is_up = False
        while not self._ended.wait(BEAT_S):
            beat = self.call("beat")
            asked = looked = time.monotonic()
            while not wait([beat], timeout=LOOK_S).done:
                now = time.monotonic()
                if now - looked > STALL_S:
                    asked = now
                looked = now
                if is_up and now - asked > limit_s and self._process is not None:
                    logger.warning(
                        "the rollout service was silent for %.0f s (cluster.heartbeat_timeout_s):"
                        " it is restarted",
                        now - asked,
                    )
                    self._process.kill()
                    return
            is_up = True

    def _send(self, message: Any) -> None:
        parts = frames.encode(message)
        try:
            with self._sending:
                frames.send(self._socket, parts)
        # Recovery: the reader finds the end of the socket, and fails the calls.
        except OSError as error:
            logger.info("a call of the rollout service could not be sent: %s", error)
            self._shut()

    def _shut(self) -> None:
        # The socket may be closed already.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    # --- thread of the process --------------------------------------------------------------------

    def _run(self, theirs: socket.socket) -> None:
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=self._environment,
                    # In its own session the process gets no Ctrl-C, which is for rank 0.
                    start_new_session=True,
                )
            except OSError as error:
                self._fail_calls(ServiceLost(f"the rollout service cannot be started: {error}"))
        self._is_up.set()
        if self._process is None:
            return
        # A process that the service left behind may keep the socket open, so watch for the exit.
        threading.Thread(target=self._watch, name="service's end", daemon=True).start()
        why = self._read()
        # This ends a process that is still running.
        self._shut()
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
        """Resolve the calls with their answers until the process is gone; return why."""
        try:
            while True:
                number, found = frames.receive(self._socket)
                if number == LINE:
                    stream, line = found
                    file = sys.stdout if stream == "out" else sys.stderr
                    print(printable(line), end="", file=file, flush=True)
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
