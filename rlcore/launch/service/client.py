"""Calls the rollout service for rank 0, and starts another one when its process dies."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcore.config import Config
from rlcore.config.derived import all_engines_timeout_s, comeback_s, engine_place_s, generates
from rlcore.data.batch import StepRollouts
from rlcore.data.generation import MemoryTag
from rlcore.data.sample import Sample
from rlcore.deadlines import (
    CLOSE_SERVICE_S,
    END_RANK_S,
    REWARD_START_S,
    SERVICE_ANSWER_S,
    SERVICE_GRACE_S,
)
from rlcore.errors import DeadlineExceeded, RunFailed
from rlcore.launch.environment import restarted
from rlcore.launch.service.frames import Begin, OpenedService
from rlcore.launch.service.process import ServiceLost, ServiceProcess

ANSWER_KEY = "60 s and cluster.heartbeat_timeout_s, in which a hanging service is replaced"
SERVICE = "the rollout service"
# The limit on starts of the process in a run.
MAX_STARTS = 6
# Methods of `RolloutSource` that are called again on a replacement service, in this order.
REPLAYED = ("restore", "keep_ledger", "published")
logger = logging.getLogger(__name__)


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
    """Calls the service for rank 0's main thread, and recovers when it dies."""

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
    def pid(self) -> int | None:
        """The process id of the newest process."""
        return self._process.pid

    def open(self, config: Config, *, greedy_baseline: bool) -> OpenedService:
        """Make the service read its prompts. Raises UserError for bad input."""
        self.config = config
        self._begin = Begin(
            config,
            greedy_baseline,
            again=restarted(),
            path=list(sys.path),
            folder=os.getcwd(),
        )
        return self._open()

    def _open(self) -> OpenedService:
        """Open the service, restarting a dead process. Raises RunFailed after MAX_STARTS."""
        assert self._begin is not None, "open comes first"
        while True:
            if self._process.lost:
                self._start_again()
            if self._begun is not self._process:
                self._process.begin(replace(self._begin, again=self._begin.again or self._started))
                self._begun = self._process
            try:
                opened: OpenedService = _result(
                    self._process.call("open"),
                    limit_s=self.config.cluster.start_timeout_s,
                    what=f"opening {SERVICE}",
                    key="cluster.start_timeout_s",
                )
                return opened
            # Recovery: start another process, up to the limit.
            except ServiceLost as error:
                logger.warning("%s", error)

    def _start_again(self) -> None:
        if self._starts >= MAX_STARTS:
            raise RunFailed(
                f"the rollout service died {self._starts} times in this run: see logs/service.log"
            )
        self._starts += 1
        logger.warning("the rollout service died: another process replaces it")
        self._process = self._new_process()

    def _new_process(self) -> ServiceProcess:
        return ServiceProcess(on_ray=self.config.cluster.launcher == "ray")

    def start(self) -> None:
        """Start the service's engines and reward workers."""
        limit_s = (
            comeback_s(self.config.rollout.engine, engine_place_s(self.config))
            + REWARD_START_S
            + SERVICE_GRACE_S
        )
        key = "cluster.start_timeout_s and rollout.engine.start_timeout_s"
        self.call("start", limit_s=limit_s, key=key)
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

    def replay(self, method: str, *arguments: Any) -> None:
        """Call a method in REPLAYED, on the replacement if the service has died."""
        self.remember(method, *arguments)
        try:
            self._repeat(method)
        except ServiceLost:
            self.reopen()

    def remember(self, method: str, *arguments: Any) -> None:
        """Replay this call on a replacement service."""
        self._newest[method] = arguments

    @property
    def state(self) -> Any:
        """The state that a replacement service would restore; None before the first hand-over."""
        return self._newest.get("restore", (None,))[0]

    def _repeat(self, method: str) -> None:
        # A large buffer or a long journal takes long to read.
        start_s = self.config.cluster.start_timeout_s
        slow = {"limit_s": start_s, "key": "cluster.start_timeout_s"}
        limits: dict[str, Any] = {} if method == "published" else slow
        self.call("source", method, *self._newest[method], **limits)

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


def _result(call: Future[Any], *, limit_s: float, what: str, key: str) -> Any:
    if not wait([call], timeout=limit_s).done:
        raise DeadlineExceeded(f"{what}: no answer within {limit_s:g} s ({key})")
    return call.result()


class RemoteSource:
    """Implements `rlcore.interfaces.RolloutSource`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._limit_s = client.config.rollout.timeout_s + SERVICE_GRACE_S

    def start(self) -> None:
        """Start the service's engines and reward workers."""
        self._client.start()

    def next_step(self, step: int) -> StepRollouts | None:
        """Implements the protocol; None also where the service was replaced."""
        found: tuple[StepRollouts, Mapping[str, Any]] | None = self._work("next_step", step)
        if found is None:
            return None
        rollouts, state = found
        self._client.remember("restore", state)
        return rollouts

    def evaluate(
        self, sets: Sequence[str] | None = None
    ) -> tuple[dict[str, float], list[Sample]] | None:
        """Implements the protocol; None also where the service was replaced."""
        scored: tuple[dict[str, float], list[Sample]] | None
        scored = self._work("source", "evaluate", sets)
        return scored

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Implements the protocol."""
        self._client.replay("published", step, version, incarnation)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the newest hand-over."""
        return dict(self._client.state or self._client.call("source", "snapshot"))

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Implements the protocol."""
        self._client.replay("restore", state)

    def keep_ledger(self, path: Path) -> None:
        """Implements the protocol."""
        self._client.replay("keep_ledger", path.absolute())

    def close(self) -> None:
        """Do nothing: the owner of the process closes the service."""

    def _work(self, part: str, *arguments: Any) -> Any:
        """Make a call that lasts as long as generation; None if the service was replaced."""
        try:
            return self._client.call(
                part, *arguments, limit_s=self._limit_s, key="rollout.timeout_s"
            )
        except ServiceLost:
            self._client.reopen()
            return None


class RemoteMemory:
    """Implements `rlcore.interfaces.EngineMemory`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._limit_s = all_engines_timeout_s(client.config) + SERVICE_GRACE_S

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
        return self._client.call(
            "memory",
            method,
            *arguments,
            limit_s=self._limit_s,
            key="rollout.engine.update_timeout_s",
        )
