"""`rlcore.interfaces.WeightSink` over engines: the trainer's side of a publication.

The trainer's main thread calls it and blocks; everything happens on the engines' asyncio loop, in
another thread. The bytes go by one transport (rollout/transports); this page is the order of things
around them, and what a failure means:

    prepare     pause, begin      the others go on without an engine that fails here
    send        the buckets       PublicationFailed: the caller runs the whole transaction again with the engines left
    finish      end, verify, set the version, resume      the others have a whole version and go on

Whoever fails is out until it took a whole publication, and is never resumed on part of one. The
others stay paused meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlcore.config import Config
from rlcore.config.derived import comeback_s, engine_place_s
from rlcore.errors import DeadlineExceeded, PublicationFailed, RunFailed
from rlcore.interfaces import RolloutEngine, WeightExpectation
from rlcore.weights import Bucket
from rollout.asyncio_utils import call_on
from rollout.weight_sync.base import GRACE_S, Failures, Transport, ask
from rollout.weight_sync.choose import choose_transport

KILL_S = 30.0
CLOSE_S = 30.0
LAST_RESORT = 6  # of the longest limit: then the loop itself is stuck

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Participants(Protocol):
    """Who takes part in publications. Called on the engines' loop."""

    async def candidates(self) -> Sequence[RolloutEngine]:
        """Those alive, with whole weights or without. Raises RunFailed when there are none and none
        will come back.
        """
        ...

    async def stale(self) -> Sequence[RolloutEngine]:
        """Those alive that wait for weights."""
        ...

    def draining(self, engine: RolloutEngine) -> None:
        """It is about to be paused."""
        ...

    def published(self, engine: RolloutEngine, version: int) -> None:
        """It has a whole version and is resumed."""
        ...

    def missed(self, engine: RolloutEngine) -> None:
        """The publication was given up while it took part: it waits for the next."""
        ...

    async def out(self, engine: RolloutEngine, why: str) -> None:
        """It missed a part. Returns when it holds up nobody any more. Raises RunFailed when none is
        left for good.
        """
        ...


class WeightPublication:
    """All engines, as the trainer's rank 0 publishes to them.

    Args:
        members: on `loop`, which runs in another thread.
        device: where the trainer's buckets are.
    """

    def __init__(
        self,
        config: Config,
        members: Participants,
        loop: asyncio.AbstractEventLoop,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config = config
        self._members = members
        self._loop = loop
        self._device = torch.device(device)
        self._mode = config.rollout.on_update
        self._limit = config.rollout.engine.update_timeout_s
        self._probe = config.rollout.engine.health_timeout_s
        # to pause, requests in flight may have to end
        self._patience = config.rollout.engine.request_timeout_s
        engine = config.rollout.engine
        self._comeback = comeback_s(engine, engine_place_s(config))  # where no engine is up
        self._verify_every = config.rollout.engine.verify_every
        # publications since the last comparison of checksums
        self._unverified = 0
        # of the publication at hand, where it is to be verified
        self._expectation: WeightExpectation | None = None
        self._transport: Transport | None = None
        self._taking: list[RolloutEngine] = []  # part in the transaction at hand

    # --- the transaction, for the trainer's thread ------------------------------------------------

    def prepare(self, buckets: Sequence[Bucket], *, only_stale: bool = False) -> None:
        """Pause, agree on the members and the layout, open the update.

        Args:
            only_stale: those alone that wait for weights; the others go on serving.

        Raises PublicationFailed when nobody can be reached, RunFailed when no engine is left.
        """
        self._call(self._prepare(buckets, only_stale))

    def send(self, bucket: Bucket, flat: Tensor) -> None:
        """Raises PublicationFailed when an engine did not take the bucket."""
        self._call(self._send(bucket, flat))

    def finish(self, version: int) -> None:
        """Raises PublicationFailed or RunFailed when no engine is left."""
        self._call(self._finish(version))

    def cancel(self) -> None:
        """The engines stay paused, and refuse to generate until a whole update came. Those well
        keep their connections.
        """
        self._call(self._give_up())

    async def _give_up(self) -> None:
        for engine in self._taking:
            self._members.missed(engine)

    def close(self) -> None:
        """For the end of a run, whatever that is: it hides no error, and does not wait for a loop
        that is stuck.
        """
        if self._transport is not None:
            try:
                self._call(self._transport.close(), CLOSE_S)
            except DeadlineExceeded as error:  # recovery: connections end with the process
                logger.warning("%s", error)

    # --- its steps, on the engines' loop ----------------------------------------------------------

    async def _prepare(self, buckets: Sequence[Bucket], only_stale: bool) -> None:
        members = self._members
        self._taking = list(await members.stale() if only_stale else await members.candidates())
        if not self._taking:
            raise PublicationFailed("no engine waits for weights")
        due = self._verify_every and self._unverified % self._verify_every == 0
        # all engines of a run keep weights alike
        self._expectation = self._taking[0].expectation() if due else None
        for engine in self._taking:
            members.draining(engine)
        await self._step("health", lambda e: e.health(), self._probe)
        await self._step("pause", lambda e: e.pause(self._mode), self._patience)
        await self._step("begin_update", lambda e: e.begin_update(buckets), self._limit)
        if self._transport is None:
            self._transport = choose_transport(self._config, self._taking, device=self._device)
        await self._all_or_again(
            self._transport.open(self._taking, buckets), "the way of the weights was not opened"
        )

    async def _send(self, bucket: Bucket, flat: Tensor) -> None:
        assert self._transport is not None
        if self._expectation is not None:
            await asyncio.to_thread(expect, self._expectation, bucket, flat)
        await self._all_or_again(
            self._transport.send(bucket, flat),
            f"bucket {bucket.index} was not taken by all engines",
        )

    async def _finish(self, version: int) -> None:
        assert self._transport is not None
        await self._all_or_again(
            self._transport.complete(), "the weights were not taken by all engines"
        )
        await self._step("end_update", lambda e: e.end_update(), self._limit)
        if self._expectation is not None:
            await self._compare(self._expectation)
        self._unverified += 1
        await self._step("set_version", lambda e: e.set_version(version), self._limit)
        await self._step("resume", lambda e: e.resume(), self._limit)
        for engine in self._taking:
            self._members.published(engine, version)

    async def _compare(self, expectation: WeightExpectation) -> None:
        said = await self._step("checksum", lambda e: e.checksum(), self._limit)
        problems = {engine: expectation.problem(one) for engine, one in said.items()}
        await self._out(
            {
                engine: f"its weights differ from what was sent: {problem}"
                for engine, problem in problems.items()
                if problem
            }
        )

    async def _step(
        self, what: str, call: Callable[[Any], Awaitable[Any]], seconds: float
    ) -> dict[Any, Any]:
        """Results of the engines that are left; those that fail are out."""
        answers = await ask(self._taking, what, call, seconds)
        await self._out(answers.failed)
        return answers.results

    async def _all_or_again(self, work: Awaitable[Failures], what: str) -> None:
        """Raises PublicationFailed unless every engine did its part."""
        failed = await work
        if failed:
            await self._out(failed)
            raise PublicationFailed(f"{what}: {'; '.join(failed.values())}")

    async def _out(self, failed: Failures) -> None:
        for engine, why in failed.items():
            logger.warning("engine %s is out: %s", engine.name, why)
            self._taking.remove(engine)
        await asyncio.gather(*(self._members.out(engine, why) for engine, why in failed.items()))
        if not self._taking:
            raise PublicationFailed(
                f"no engine takes the new weights: {'; '.join(failed.values())}"
            )

    # --- between the threads ----------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T], limit: float | None = None) -> T:
        """Every step keeps its own limits; this one is for a loop that does not run."""
        if limit is None:
            limit = LAST_RESORT * (max(self._limit, self._patience, self._comeback) + GRACE_S)
        return call_on(
            self._loop,
            work,
            limit,
            f"the engines' event loop did nothing for {limit:g} s: something blocks it",
        )


def expect(expectation: WeightExpectation, bucket: Bucket, flat: Tensor) -> None:
    for name, tensor in bucket.views(flat):
        expectation.add(name, tensor)


class StaticParticipants:
    """`Participants` that are never started again: who fails is ended and forgotten."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self.engines = list(engines)  # those left
        self.dropped: dict[str, str] = {}  # engine: why

    async def candidates(self) -> Sequence[RolloutEngine]:
        return self.engines

    async def stale(self) -> Sequence[RolloutEngine]:
        return []

    def draining(self, engine: RolloutEngine) -> None: ...

    def published(self, engine: RolloutEngine, version: int) -> None: ...

    def missed(self, engine: RolloutEngine) -> None: ...

    async def out(self, engine: RolloutEngine, why: str) -> None:
        self.engines.remove(engine)
        self.dropped[engine.name] = why
        answers = await ask([engine], "kill", lambda e: e.kill(), KILL_S)
        for trouble in answers.failed.values():
            logger.warning("engine %s did not end: %s", engine.name, trouble)
        if not self.engines:
            reasons = "; ".join(f"{name}: {why}" for name, why in self.dropped.items())
            raise RunFailed(f"no engine is left to take the new weights: {reasons}")
