"""`rlcore.protocols.WeightSink` over engines: the trainer's side of a publication.

The trainer's main thread calls it and blocks; the engines live on an asyncio loop in another thread. Engines in this
process take each bucket by copy, engines in other processes over one process group (rollout/engines/weight_group.py) that
lasts as long as its members do.

An engine that fails a step is dropped and closed. What that means for the others depends on when it happens:

    prepare     they go on without it
    send        PublicationFailed: the broadcast may have broken for all, the caller runs the whole transaction again
    finish      they have a whole version and go on without it

and when nobody is left: RunFailed, with every engine's reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from rlcore.config import Config
from rlcore.errors import DeadlineExceeded, PublicationFailed, RlcoreError, RunFailed
from rlcore.protocols import RolloutEngine
from rlcore.weights import DTYPES, Bucket, combine_fingerprints, fingerprint
from rollout.deadlines import within
from rollout.engines.weight_group import Backend, GroupAddress, WeightGroup, gpu_identity, open_store

PROBE_S = 10.0          # an engine that does not answer /health for so long is given up
JOIN_S = 60.0           # for all members to meet, at most
GRACE_S = 10.0          # an engine keeps its own deadlines, ours come a little later

logger = logging.getLogger(__name__)
Call = Callable[[Any], Awaitable[Any]]


@runtime_checkable
class GroupMember(Protocol):
    """An engine in another process: weights reach it over a process group."""

    name: str

    async def join_group(self, address: GroupAddress, rank: int) -> None: ...

    async def health(self) -> dict[str, Any]: ...

    async def kill(self) -> None: ...


class EngineSink:
    """All engines, as the trainer's rank 0 publishes to them.

    Args:
        engines: on `loop`, which runs in another thread; `self.engines` holds those that are left.
        device: where the trainer's buckets are.
        host: the address under which the engines reach this process.
        verify: compare a checksum of every engine's weights with what was sent, each time.
        on_drop: told of each engine that is given up, and why.
    """

    def __init__(
        self, config: Config, engines: Sequence[RolloutEngine], loop: asyncio.AbstractEventLoop, *,
        device: torch.device | str = "cpu", host: str = "127.0.0.1", verify: bool = False,
        on_drop: Callable[[RolloutEngine, str], None] | None = None,
    ) -> None:
        self.engines = list(engines)
        self.dropped: dict[str, str] = {}       # engine: why
        self._config, self._loop, self._device, self._host = config, loop, torch.device(device), host
        self._mode = config.rollout.on_update
        self._limit = config.rollout.engine.update_timeout_s
        self._last_resort = max(self._limit, config.rollout.engine.request_timeout_s) + 3 * GRACE_S
        self._verify, self._on_drop = verify, on_drop
        self._fingerprints: dict[str, str] = {}
        self._group: WeightGroup | None = None
        self._members: list[GroupMember] = []   # of the group, by rank - 1

    # --- the transaction ------------------------------------------------------------------------------------------

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Raises PublicationFailed when the process group does not come together, RunFailed when no engine is left."""
        self._fingerprints = {}
        self._probe(self._remote())
        self._on_all("pause", lambda e: e.pause(self._mode), self._config.rollout.engine.request_timeout_s)
        self._on_all("begin_update", lambda e: e.begin_update(buckets), self._limit)
        self._connect()

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        """Raises PublicationFailed when an engine did not take the bucket."""
        if self._verify:
            dtype = DTYPES[self._config.rollout.engine.dtype or self._config.model.dtype]
            self._fingerprints |= {name: fingerprint(tensor.to(dtype)) for name, tensor in bucket.views(flat)}
        members, before = self._members, len(self.dropped)
        answers = self._begin(
            "receive_bucket",
            lambda e: e.receive_bucket(bucket.index, None if e in members else flat),
            self._limit,
        )
        broken = self._broadcast(flat)
        failed = self._collect(answers)
        if broken is not None:      # then every member's bucket failed; who is to blame does not answer any more
            self._probe(members)
            failed = {engine: why for engine, why in failed.items() if engine not in members}
        self._drop(failed)
        if broken is not None or len(self.dropped) > before:
            lost = "; ".join(list(self.dropped.values())[before:]) or str(broken)
            raise PublicationFailed(f"bucket {bucket.index} was not taken by all engines: {lost}")

    def finish(self, version: int) -> None:
        """Raises RunFailed when no engine is left."""
        self._on_all("end_update", lambda e: e.end_update(), self._limit)
        if self._verify:
            self._compare()
        self._on_all("set_version", lambda e: e.set_version(version), self._limit)
        self._on_all("resume", lambda e: e.resume(), self._limit)

    def cancel(self) -> None:
        """The engines stay paused, and refuse to generate until a whole update came."""
        self._disconnect()

    def close(self) -> None:
        self._disconnect()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        expected = combine_fingerprints(self._fingerprints)
        sums = self._on_all("checksum", lambda e: e.checksum(), self._limit)
        self._drop({
            engine: f"its weights differ from what was sent: checksum {got[:12]}, expected {expected[:12]}"
            for engine, got in zip(self.engines, sums) if got != expected
        })

    def _broadcast(self, flat: Tensor) -> RlcoreError | None:
        """The error that broke the group, if one did."""
        if self._group is None:
            return None
        try:
            self._group.send(flat)
        except RunFailed as error:      # recovery: without the group, then by the caller
            self._disconnect()
            return error
        return None

    def _connect(self) -> None:
        """Make the group anew unless its members are still the same."""
        members = self._remote()
        if self._group is not None and members == self._members:
            return
        self._disconnect()
        if not members:
            return
        limit = min(self._limit, JOIN_S)
        store, port = open_store(self._host, limit)
        address = GroupAddress(self._host, port, 1 + len(members), self._backend(members), limit)
        ranks = {id(member): 1 + i for i, member in enumerate(members)}
        answers = self._begin("join_group", lambda e: e.join_group(address, ranks[id(e)]), limit, members)
        broken: RlcoreError | None = None
        try:
            self._group = WeightGroup(address, 0, device=self._device, store=store)
        except RunFailed as error:      # recovery: see below
            broken = error
        failed = self._collect(answers)
        if broken is not None or failed:
            self._disconnect()
            before = len(self.dropped)
            self._probe(members)
            why = "; ".join([*list(self.dropped.values())[before:], *failed.values(), str(broken or "")])
            raise PublicationFailed(f"the process group for weights did not come together: {why}")
        self._members = members

    def _disconnect(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, []

    def _backend(self, members: Sequence[GroupMember]) -> Backend:
        """NCCL needs a GPU for each member; where one is shared, or there is none, gloo."""
        answers = self._begin("health", lambda e: e.health(), PROBE_S, members)
        if self._collect(answers):
            return "gloo"       # whoever is ill will not join either
        gpus = [gpu_identity(self._device), *(answer.result()["gpu"] for answer in answers.values())]
        return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"

    def _probe(self, members: Sequence[GroupMember]) -> None:
        """Drop those that do not answer."""
        self._drop(self._collect(self._begin("health", lambda e: e.health(), PROBE_S, members)))

    def _remote(self) -> list[GroupMember]:
        return [engine for engine in self.engines if isinstance(engine, GroupMember)]

    # --- calls on the engines' loop -------------------------------------------------------------------------------

    def _begin(self, what: str, call: Call, seconds: float, engines: Sequence[Any] | None = None) -> dict[Any, Future[Any]]:
        """Start `call(engine)` for every engine at once."""

        async def limited(engine: RolloutEngine) -> Any:
            return await within(
                seconds + GRACE_S, call(engine), lambda: f"engine {engine.name} did not answer {what} within {seconds:g} s"
            )

        chosen = self.engines if engines is None else engines
        return {engine: asyncio.run_coroutine_threadsafe(limited(engine), self._loop) for engine in chosen}

    def _collect(self, answers: dict[Any, Future[Any]]) -> dict[Any, str]:
        """Wait for all; {engine: what went wrong}."""
        _, waiting = wait(answers.values(), timeout=self._last_resort)      # `within` kept the limit of each call
        if waiting:
            raise DeadlineExceeded(f"the engines' event loop did nothing for {self._last_resort:g} s: something blocks it")
        errors = {engine: future.exception() for engine, future in answers.items()}
        return {engine: describe(error) for engine, error in errors.items() if error is not None}

    def _on_all(self, what: str, call: Call, seconds: float) -> list[Any]:
        """Results of the engines that are left; those that fail are dropped."""
        answers = self._begin(what, call, seconds)
        self._drop(self._collect(answers))
        return [answers[engine].result() for engine in self.engines]

    def _drop(self, failed: dict[Any, str]) -> None:
        """Raises RunFailed when nobody is left."""
        for engine, why in failed.items():
            if engine not in self.engines:
                continue
            logger.warning("engine %s is given up: %s", engine.name, why)
            self.engines.remove(engine)
            self.dropped[engine.name] = why
            end = engine.kill if isinstance(engine, GroupMember) else engine.close
            trouble = self._collect(self._begin("close", lambda _, end=end: end(), PROBE_S, [engine]))  # type: ignore[misc]
            if trouble:
                logger.warning("engine %s did not end: %s", engine.name, trouble[engine])
            if self._on_drop is not None:
                self._on_drop(engine, why)
        if not self.engines:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.dropped.items())
            raise RunFailed(f"no engine is left to take the new weights: {reasons}")


def describe(error: BaseException) -> str:
    return str(error) if isinstance(error, RlcoreError) else f"{type(error).__name__}: {error}"
