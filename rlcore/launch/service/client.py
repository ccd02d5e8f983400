"""Rank 0's side of the rollout service: its child process, calls, and a replacement if it dies."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.boundary.child_environment import service_environment
from rlcore.config import Config
from rlcore.config.derived import (
    all_engines_timeout_s,
    generates,
    placement_timeout_s,
    restart_timeout_s,
)
from rlcore.data.batch import StepRollouts
from rlcore.data.generation import MemoryTag
from rlcore.data.sample import Sample
from rlcore.deadlines import (
    CLOSE_SERVICE_S,
    END_RANK_S,
    REWARD_START_S,
    SERVICE_ANSWER_S,
    SERVICE_GRACE_S,
    STALL_S,
)
from rlcore.errors import DeadlineExceeded, PartLost, RunFailed
from rlcore.launch.environment import RESTARTED
from rlcore.launch.service import frames
from rlcore.launch.service.frames import Begin
from rlcore.terminal import printable

MODULE = "rlcore.launch.service.child"
ANSWER_KEY = "60 s and cluster.heartbeat_timeout_s, in which a hanging service is replaced"
SERVICE = "the rollout service"
# The limit on starts of the process in a run.
MAX_STARTS = 6
# Methods of `RolloutSource` that are called again on a replacement service, in this order.
REPLAYED = ("restore", "keep_ledger", "published")
BEAT_S = 1.0
POLL_S = 0.5
logger = logging.getLogger(__name__)


class ServiceLost(PartLost):
    """The process of the service died; its replacement has no state."""


class ServiceProcess:
    """A child process with the service. It imports at once, and then waits for `Begin`.

    Linux ends the child with the *thread* that made it, so the main thread makes it.

    Args:
        on_ray: the service uses a Ray cluster.
    """

    def __init__(self, *, on_ray: bool) -> None:
        self._socket, theirs = socket.socketpair()
        limit = struct.pack("ll", int(SERVICE_ANSWER_S), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self._sending = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lost: ServiceLost | None = None
        self._ended = threading.Event()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=service_environment(on_ray=on_ray),
                    # In its own session the process gets no Ctrl-C, which is for rank 0.
                    start_new_session=True,
                )
        # Recovery: the owner starts another one, as after a death.
        except OSError as error:
            self._lost = ServiceLost(f"the rollout service cannot be started: {error}")
            logger.warning("%s", self._lost)
            self.pid = 0
            self._ended.set()
            return
        self.pid = self._process.pid
        threading.Thread(target=self._read, name="service", daemon=True).start()

    @property
    def lost(self) -> bool:
        """Whether the process is gone."""
        return self._lost is not None

    def begin(self, message: Begin) -> None:
        """Send the first message; if the process is gone, the next call fails."""
        self._send(message)
        limit_s = message.config.cluster.heartbeat_timeout_s
        threading.Thread(
            target=self._watch, args=(limit_s,), name="service's beat", daemon=True
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
        if self._ended.wait(wait_s):
            return
        self._shut()
        if not self._ended.wait(END_RANK_S):
            logger.warning("the rollout service does not end and is killed")
            self._process.kill()
            self._ended.wait(END_RANK_S)

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

    def _fail_calls(self, why: ServiceLost) -> None:
        self._lost = why
        for number in list(self._calls):
            if (future := self._calls.pop(number, None)) is not None:
                future.set_exception(why)

    # --- threads ----------------------------------------------------------------------------------

    def _watch(self, limit_s: float) -> None:
        """Kill a process that answers no beat for `limit_s`.

        The time before the first answer does not count, as the start has its own deadline; nor does
        time in which this process was suspended.
        """
        is_up = False
        while not self._ended.wait(BEAT_S):
            beat = self.call("beat")
            asked = looked = time.monotonic()
            while not wait([beat], timeout=POLL_S).done:
                if self._process.poll() is not None:
                    # A process that the service left behind keeps the socket open.
                    self._shut()
                now = time.monotonic()
                if now - looked > STALL_S:
                    asked = now
                looked = now
                if is_up and now - asked > limit_s:
                    logger.warning(
                        "the rollout service was silent for %.0f s (cluster.heartbeat_timeout_s):"
                        " it is restarted",
                        now - asked,
                    )
                    self._process.kill()
                    self._process.wait()
                    self._shut()
                    return
            is_up = True

    def _read(self) -> None:
        """Resolve the calls with their answers until the process is gone."""
        try:
            while True:
                number, found = frames.receive(self._socket)
                if number == frames.LINE:
                    stream, line = found
                    file = sys.stdout if stream == "out" else sys.stderr
                    print(printable(line), end="", file=file, flush=True)
                elif (future := self._calls.pop(number, None)) is not None:
                    good, value = found
                    future.set_result(value) if good else future.set_exception(value)
        except (EOFError, OSError, TypeError, ValueError) as error:
            why = str(error)
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


def begin_service(config: Config, stack: ExitStack) -> ServiceClient | None:
    """Start the service's process on rank 0; it imports while this process joins the other ranks.

    Returns None on other ranks, if nothing generates, and if the service runs in rank 0's process.

    Args:
        stack: ends the process.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0 or config.rollout.service == "in_process" or not generates(config):
        return None
    client = ServiceClient(config)
    stack.callback(client.close)
    return client


class ServiceClient:
    """The rollout service for rank 0's main thread, with a replacement for one that dies.

    Implements `rlcore.interfaces.RolloutSource`.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._process = self._new_process()
        self._starts = 1
        self._begin: Begin | None = None
        # The process that has received `Begin`.
        self._begun: ServiceProcess | None = None
        self._started = False
        # The newest arguments of the methods in REPLAYED.
        self._newest: dict[str, tuple[Any, ...]] = {}

    # --- lifecycle --------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The process id of the newest process."""
        return self._process.pid

    def open(self, config: Config, *, greedy_baseline: bool) -> NDArray[np.int64]:
        """Make the service read its prompts; return their lengths. Raises UserError."""
        self.config = config
        self._begin = Begin(
            config,
            greedy_baseline,
            again=RESTARTED in os.environ,
            path=list(sys.path),
            folder=os.getcwd(),
        )
        return self._open()

    def _open(self) -> NDArray[np.int64]:
        """Open the service, restarting a dead process. Raises RunFailed after MAX_STARTS."""
        assert self._begin is not None, "open comes first"
        while True:
            if self._process.lost:
                if self._starts >= MAX_STARTS:
                    raise RunFailed(
                        f"the rollout service died {self._starts} times in this run: see"
                        " logs/service.log"
                    )
                self._starts += 1
                logger.warning("the rollout service died: another process replaces it")
                self._process = self._new_process()
            if self._begun is not self._process:
                self._process.begin(replace(self._begin, again=self._begin.again or self._started))
                self._begun = self._process
            try:
                lengths: NDArray[np.int64] = _result(
                    self._process.call("open"),
                    limit_s=self.config.cluster.start_timeout_s,
                    what=f"opening {SERVICE}",
                    key="cluster.start_timeout_s",
                )
                return lengths
            # Recovery: start another process, up to the limit.
            except ServiceLost as error:
                logger.warning("%s", error)

    def _new_process(self) -> ServiceProcess:
        return ServiceProcess(on_ray=self.config.cluster.launcher == "ray")

    def start(self) -> None:
        """Start the service's engines and reward workers."""
        engines_s = restart_timeout_s(self.config.rollout.engine, placement_timeout_s(self.config))
        self.call(
            "start",
            limit_s=engines_s + REWARD_START_S + SERVICE_GRACE_S,
            key="cluster.start_timeout_s and rollout.engine.start_timeout_s",
        )
        self._started = True

    def reopen(self) -> None:
        """Restore the state of the last hand-over in a replacement service, after ServiceLost.

        Its engines wait for weights. Raises ServiceLost if engines share the trainer's GPUs, since
        their use of GPU memory is then unknown.
        """
        if self.config.rollout.engine.colocated:
            raise ServiceLost(
                f"{SERVICE} died, so it is unknown how much of the trainer's GPU memory its"
                " engines hold"
            )
        self._open()
        if self._started:
            self.start()
        for method in REPLAYED:
            if method in self._newest:
                self._repeat(method)

    def close(self) -> None:
        """End the service, its engines and its process within a limit; may be called twice."""
        process = self._process
        has_begun = self._begun is process
        if has_begun and not process.lost:
            wait([process.call("close")], timeout=CLOSE_SERVICE_S)
        process.end(wait_s=END_RANK_S if has_begun else 0.0)

    # --- calls ------------------------------------------------------------------------------------

    def call(
        self, part: str, *arguments: Any, limit_s: float = SERVICE_ANSWER_S, key: str = ANSWER_KEY
    ) -> Any:
        """Call a method of the host, from the main thread.

        Raises ServiceLost, DeadlineExceeded, or the error that the service raised.

        Args:
            limit_s: for a service that answers beats. A hanging service has
                `cluster.heartbeat_timeout_s` more, and is then lost.
        """
        heartbeat_s = self.config.cluster.heartbeat_timeout_s
        call = self._process.call(part, *arguments)
        return _result(call, limit_s=limit_s + heartbeat_s, what=f"{SERVICE}: {part}", key=key)

    def begin_publication(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin a call of `WeightPublication`; "open" may go to a replacement service."""
        if method == "open" and self._process.lost:
            self.reopen()
        return self._process.call("publication", method, *arguments)

    # --- source of samples ------------------------------------------------------------------------

    def next_step(self, step: int) -> StepRollouts | None:
        """Implements the protocol; None also where the service was replaced."""
        found: tuple[StepRollouts, Mapping[str, Any]] | None = self._generate("next_step", step)
        if found is None:
            return None
        rollouts, state = found
        self._newest["restore"] = (state,)
        return rollouts

    def evaluate(
        self, sets: Sequence[str] | None = None
    ) -> tuple[dict[str, float], list[Sample]] | None:
        """Implements the protocol; None also where the service was replaced."""
        scored: tuple[dict[str, float], list[Sample]] | None
        scored = self._generate("source", "evaluate", sets)
        return scored

    def _generate(self, part: str, *arguments: Any) -> Any:
        """Make a call that lasts as long as generation; None if the service was replaced."""
        limit_s = self.config.rollout.timeout_s + SERVICE_GRACE_S
        try:
            return self.call(part, *arguments, limit_s=limit_s, key="rollout.timeout_s")
        except ServiceLost:
            self.reopen()
            return None

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Implements the protocol."""
        self._replay("published", step, version, incarnation)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the newest hand-over, which a replacement would restore."""
        [state] = self._newest.get("restore", (None,))
        return dict(state or self.call("source", "snapshot"))

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Implements the protocol."""
        self._replay("restore", state)

    def keep_ledger(self, path: Path) -> None:
        """Implements the protocol."""
        self._replay("keep_ledger", path.absolute())

    def _replay(self, method: str, *arguments: Any) -> None:
        """Call a method in REPLAYED, on the replacement if the service has died."""
        self._newest[method] = arguments
        try:
            self._repeat(method)
        except ServiceLost:
            self.reopen()

    def _repeat(self, method: str) -> None:
        # A large buffer or a long journal takes long to read.
        start_s = self.config.cluster.start_timeout_s
        slow = {"limit_s": start_s, "key": "cluster.start_timeout_s"}
        limits: dict[str, Any] = {} if method == "published" else slow
        self.call("source", method, *self._newest[method], **limits)


def _result(call: Future[Any], *, limit_s: float, what: str, key: str) -> Any:
    if not wait([call], timeout=limit_s).done:
        raise DeadlineExceeded(f"{what}: no answer within {limit_s:g} s ({key})")
    return call.result()


class RemoteMemory:
    """Implements `rlcore.interfaces.EngineMemory`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Implements the protocol."""
        self._call("release", tags)

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        """Implements the protocol."""
        self._call("restore", tags)

    def any_running(self) -> bool:
        """Implements the protocol."""
        return bool(self._call("any_running"))

    def _call(self, method: str, *arguments: Any) -> Any:
        limit_s = all_engines_timeout_s(self._client.config) + SERVICE_GRACE_S
        key = "rollout.engine.update_timeout_s"
        return self._client.call("memory", method, *arguments, limit_s=limit_s, key=key)
