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

ANSWER_KEY = "60 s and cluster.heartbeat_timeout_s, in which one that hangs is replaced"
SERVICE = "the rollout service"
# Starts of the process in one run.
MAX_STARTS = 6
# Methods of `RolloutSource` that are repeated at a replacement service, in this order.
REPLAYED = ("restore", "keep_ledger", "published")
logger = logging.getLogger(__name__)


def begin_service(config: Config, stack: ExitStack) -> ServiceClient | None:
    """Start the process of the service on rank 0, so that it imports while this one joins others.

    None on other ranks, where nothing generates, and where the service is in rank 0's process.

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
        # the process that has got `Begin`
        self._begun: ServiceProcess | None = None
        self._started = False
        # the newest arguments of methods in REPLAYED
        self._newest: dict[str, tuple[Any, ...]] = {}

    # --- the service's life -----------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """The number of the newest process."""
        return self._process.pid

    def open(self, config: Config, *, greedy_baseline: bool) -> OpenedService:
        """Let the service read its prompts. Raises UserError for bad prompts and the like."""
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
        """Open the service, in another process if this one is lost. Raises RunFailed after many."""
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
            # recovery: another process, as often as it may be started
            except ServiceLost as error:
                logger.warning("%s", error)

    def _start_again(self) -> None:
        if self._starts >= MAX_STARTS:
            raise RunFailed(
                f"the rollout service died {self._starts} times in this run: see logs/service.log"
            )
        self._starts += 1
        logger.warning("the rollout service died: another process takes its place")
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
        """Bring the replacement service, after ServiceLost, to the state of the last hand-over.

        Its engines wait for weights. Raises ServiceLost where engines share the trainer's GPUs:
        what they hold there is not known any more.
        """
        if self.config.rollout.engine.colocated:
            raise ServiceLost(
                f"{SERVICE} died, and with it the knowledge of what its engines keep on the"
                " trainer's GPUs"
            )
        self._open()
        if self._started:
            self.start()
        for method in REPLAYED:
            if method in self._newest:
                self._repeat(method)

    def close(self) -> None:
        """End the service, its engines and its process, within a limit; may be called twice."""
        process = self._process
        has_begun = self._begun is process
        if has_begun and not process.lost:
            wait([process.call("close")], timeout=CLOSE_SERVICE_S)
        process.end(wait_s=END_RANK_S if has_begun else 0.0)

    # --- calls ------------------------------------------------------------------------------------

    def replay(self, method: str, *arguments: Any) -> None:
        """Call a method in REPLAYED, of the replacement if the service has died."""
        self.remember(method, *arguments)
        try:
            self._repeat(method)
        except ServiceLost:
            self.reopen()

    def remember(self, method: str, *arguments: Any) -> None:
        """Replay this call at a replacement service."""
        self._newest[method] = arguments

    @property
    def state(self) -> Any:
        """The state that a replacement service would restore; None for its beginning."""
        return self._newest.get("restore", (None,))[0]

    def _repeat(self, method: str) -> None:
        # A large buffer or a long journal takes its time.
        start_s = self.config.cluster.start_timeout_s
        slow = {"limit_s": start_s, "key": "cluster.start_timeout_s"}
        limits: dict[str, Any] = {} if method == "published" else slow
        self.call("source", method, *self._newest[method], **limits)

    def call(
        self, part: str, *arguments: Any, limit_s: float = SERVICE_ANSWER_S, key: str = ANSWER_KEY
    ) -> Any:
        """Call a method of the host, from the main thread.

        Raises ServiceLost, DeadlineExceeded, or what the service raised.

        Args:
            limit_s: for a service that lives. A service that hangs has
                `cluster.heartbeat_timeout_s` more, after which it is lost.
        """
        heartbeat_s = self.config.cluster.heartbeat_timeout_s
        call = self._process.call(part, *arguments)
        return _result(call, limit_s=limit_s + heartbeat_s, what=f"{SERVICE}: {part}", key=key)

    def begin_publication(self, method: str, *arguments: Any) -> Future[Any]:
        """Begin a call of `WeightPublication`; "open" is for the replacement of a lost service."""
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
        """The state of the newest hand-over, which came with it."""
        return dict(self._client.state or self._client.call("source", "snapshot"))

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Implements the protocol."""
        self._client.replay("restore", state)

    def keep_ledger(self, path: Path) -> None:
        """Implements the protocol."""
        self._client.replay("keep_ledger", path.absolute())

    def close(self) -> None:
        """Do nothing: whoever made its process closes the service."""

    def _work(self, part: str, *arguments: Any) -> Any:
        """Make a call that takes as long as generation; None where the service was replaced."""
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
