"""`rlcore.interfaces.WeightSink` over engines: the trainer's side of a publication.

The trainer's main thread calls it and blocks; everything happens on the engines' asyncio loop, in
another thread. One transport carries the bytes (base.py); this module is the order of the steps
around them, and what a failure means:

    prepare     pause, begin: the others go on without an engine that fails here
    send        the buckets: after a failure PublicationFailed is raised, and the caller runs the
                whole transaction again with the engines that are left
    finish      compare digests, end, set the version, resume

A failed engine takes no traffic until it has received a complete publication, and is never resumed
on part of one. The others stay paused meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from rlcore.config import Config
from rlcore.config.derived import comeback_s, engine_place_s, longest_request_s
from rlcore.deadlines import ABORT_S, CLOSE_ENGINES_S, TRANSPORT_GRACE_S
from rlcore.errors import DeadlineExceeded, PublicationFailed
from rlcore.interfaces import RankPlace, RolloutEngine
from rlcore.timeline.recorder import RECORDER, now
from rlcore.weights import Bucket
from rollout.asyncio_utils import call_on
from rollout.weight_sync.base import Failures, Transport, ask, gpus_of
from rollout.weight_sync.choose import choose_transport

STAGES = ("publication", "stages")  # of the timeline
LAST_RESORT = 6  # times the longest limit: then the loop itself is stuck

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Participants(Protocol):
    """The engines that take part in publications. Its methods run on the engines' loop."""

    async def candidates(self) -> Sequence[RolloutEngine]:
        """The engines that are alive, with whole weights or without.

        Raises RunFailed when there are none and none will come back.
        """
        ...

    async def stale(self) -> Sequence[RolloutEngine]:
        """The engines that are alive and wait for weights."""
        ...

    def draining(self, engine: RolloutEngine) -> None:
        """The engine is about to be paused."""
        ...

    def published(self, engine: RolloutEngine, version: int) -> None:
        """The engine has a whole version and is resumed."""
        ...

    def missed(self, engine: RolloutEngine) -> None:
        """The publication was given up while the engine took part: it waits for the next."""
        ...

    async def out(self, engine: RolloutEngine, why: str) -> None:
        """The engine failed in the publication. Returns when nothing waits for it any more.

        Raises RunFailed when no engine is left for good.
        """
        ...


class WeightPublication:
    """Publishes weights from the trainer's rank 0 to the engines.

    Args:
        participants: the engines, to be asked on `loop`.
        loop: the engines' event loop, which runs in another thread.
        device: where the trainer's buckets are.
    """

    def __init__(
        self,
        config: Config,
        participants: Participants,
        loop: asyncio.AbstractEventLoop,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self._config = config
        self._participants = participants
        self._loop = loop
        self._device = torch.device(device)
        self._mode = config.rollout.on_update
        self._limit = config.rollout.engine.update_timeout_s
        self._probe = config.rollout.engine.health_timeout_s
        engine = config.rollout.engine
        # requests in flight may have to end before an engine is paused; the fleet watches them
        drains = self._mode == "drain"
        self._pause_limit = longest_request_s(config) + ABORT_S if drains else self._limit
        # how long `candidates` may wait for an engine to come back
        self._comeback = comeback_s(engine, engine_place_s(config))
        self._transport: Transport | None = None
        self._engines: list[RolloutEngine] = []  # in the current transaction
        # of the timeline: the number of the transaction, its begin, the begin of its stage
        self._transactions = 0
        self._opened_at = 0.0
        self._stage_at = 0.0

    # --- the transaction, for the trainer's thread ------------------------------------------------

    def prepare(
        self,
        buckets: Sequence[Bucket],
        *,
        only_stale: bool = False,
        trainer_gpus: Sequence[str] = (),
        trainer_ranks: Sequence[RankPlace] = (),
    ) -> None:
        """Pause the engines, agree with them on the layout, open the update.

        Args:
            only_stale: publish only to the engines that wait for weights; the others go on serving.
            trainer_gpus: the GPUs on which a rank can make handles.
            trainer_ranks: where each rank is, if all of them can send.

        Raises PublicationFailed when no engine can be reached, RunFailed when none is left.
        """
        self._call(self._prepare(buckets, only_stale, trainer_gpus, trainer_ranks))

    @property
    def sender_orders(self) -> Mapping[int, str]:
        """See `WeightSink.sender_orders`."""
        return {} if self._transport is None else self._transport.orders

    def meet(self, places: Mapping[int, str]) -> None:
        """See `WeightSink.meet`."""
        assert self._transport is not None
        self._call(
            self._all_or_again(
                self._transport.meet(places), "the trainer's ranks were not met by all engines"
            )
        )

    @property
    def stop_order(self) -> str:
        """See `WeightSink.stop_order`."""
        return "" if self._transport is None else self._transport.stop_order

    @property
    def handle_gpus(self) -> list[str]:
        """The GPUs of the engines that are left, if they take handles of memory there."""
        if self._transport is None or not self._transport.by_handle:
            return []
        return [gpu for engine in self._engines for gpu in gpus_of(engine)]

    def send(self, bucket: Bucket, flat: Tensor, handles: Mapping[str, str] | None = None) -> None:
        """Send one bucket. Raises PublicationFailed when an engine did not take it, or one before.

        Args:
            handles: of the bucket on each of `handle_gpus`.
        """
        self._call(self._send(bucket, flat, handles))

    def send_called(self, bucket: Bucket, flat: Tensor) -> None:
        """See `WeightSink.send_called`."""
        self._call(self._send_called(bucket, flat))

    def finish(self, version: int) -> None:
        """Verify and close the update, and resume the engines on `version`.

        Raises PublicationFailed or RunFailed when no engine is left.
        """
        self._call(self._finish(version))

    def cancel(self) -> None:
        """Give the transaction up. The engines stay paused, and refuse to generate until a whole
        update has come. Connections that work are kept.

        Raises RunFailed when an engine failed at what it still took, and none is left for good.
        """
        self._call(self._give_up())

    async def _give_up(self) -> None:
        await self._out_after_a_failure(
            {} if self._transport is None else await self._transport.give_up()
        )
        for engine in self._engines:
            self._participants.missed(engine)
        self._record_engines(self._engines, "given up")

    def close(self) -> None:
        """Close the transport at the end of a run, without an error of its own and without waiting
        for a loop that is stuck.
        """
        if self._transport is not None:
            try:
                self._call(self._transport.close(), CLOSE_ENGINES_S)
            except DeadlineExceeded as error:  # recovery: connections end with the process
                logger.warning("%s", error)

    # --- its steps, on the engines' loop ----------------------------------------------------------

    async def _prepare(
        self,
        buckets: Sequence[Bucket],
        only_stale: bool,
        trainer_gpus: Sequence[str],
        trainer_ranks: Sequence[RankPlace],
    ) -> None:
        participants = self._participants
        self._transactions += 1
        self._opened_at = self._stage_at = now()
        self._engines = list(
            await participants.stale() if only_stale else await participants.candidates()
        )
        if not self._engines:
            raise PublicationFailed("no engine waits for weights")
        for engine in self._engines:
            participants.draining(engine)
        await self._step("health", lambda e: e.health(), self._probe)
        await self._step("pause", lambda e: e.pause(self._mode), self._pause_limit)
        await self._step("begin_update", lambda e: e.begin_update(buckets), self._limit)
        if self._transport is None:
            self._transport = choose_transport(self._config, self._engines, device=self._device)
        self._transport.trainer_gpus = trainer_gpus
        self._transport.trainer_ranks = trainer_ranks
        self._transport.has_all_engines = not only_stale
        await self._all_or_again(
            self._transport.open(self._engines, buckets), "the way of the weights was not opened"
        )
        self._record_stage(f"transport {self._transport.name}: open")

    async def _send(self, bucket: Bucket, flat: Tensor, handles: Mapping[str, str] | None) -> None:
        assert self._transport is not None
        await self._all_or_again(
            self._transport.send(bucket, flat)
            if handles is None
            else self._transport.send_handles(bucket, handles),
            f"the weights up to bucket {bucket.index} were not taken by all engines",
        )
        self._record_stage(f"bucket {bucket.index}", bytes=bucket.num_bytes)

    async def _send_called(self, bucket: Bucket, flat: Tensor) -> None:
        assert self._transport is not None
        await self._out_after_a_failure(await self._transport.send_called(bucket, flat))

    async def _finish(self, version: int) -> None:
        assert self._transport is not None
        await self._all_or_again(
            self._transport.complete(), "the weights were not taken by all engines"
        )
        self._record_stage("complete")
        await self._step("end_update", lambda e: e.end_update(), self._limit)
        await self._step("set_version", lambda e: e.set_version(version), self._limit)
        await self._step("resume", lambda e: e.resume(), self._limit)
        for engine in self._engines:
            self._participants.published(engine, version)
        self._record_engines(self._engines, f"version {version}")
        args = {"publication": self._transactions, "engines": len(self._engines)}
        RECORDER.add(STAGES, f"version {version}", self._opened_at, now(), **args)

    def _record_stage(self, stage: str, **args: Any) -> None:
        """Record a stage of the transaction, which ends now."""
        ended = now()
        RECORDER.add(STAGES, stage, self._stage_at, ended, **args)
        self._stage_at = ended

    def _record_engines(self, engines: Sequence[RolloutEngine], outcome: str) -> None:
        """Record for how long the transaction has held these engines."""
        for engine in engines:
            track = (f"engine {engine.name}", "weights")
            args = {"publication": self._transactions}
            RECORDER.add(track, outcome, self._opened_at, now(), **args)

    async def _step(
        self, what: str, call: Callable[[Any], Awaitable[Any]], seconds: float
    ) -> dict[Any, Any]:
        """Run one step on every engine, and return its results. Engines that fail are out."""
        self._stage_at = now()  # the trainer gathers between the stages
        answers = await ask(self._engines, what, call, seconds)
        self._record_stage(what, slowest=answers.slowest)
        await self._out(answers.failed)
        return answers.results

    async def _all_or_again(self, work: Awaitable[Failures], what: str) -> None:
        """Await a step of the transport. Raises PublicationFailed if any engine failed."""
        self._stage_at = now()
        failed = await work
        if failed:
            await self._out(failed)
            raise PublicationFailed(f"{what}: {'; '.join(failed.values())}")

    async def _out(self, failed: Failures) -> None:
        for engine, why in failed.items():
            logger.warning("engine %s is out: %s", engine.name, why)
            self._engines.remove(engine)
        self._record_engines([*failed], "out")
        await asyncio.gather(
            *(self._participants.out(engine, why) for engine, why in failed.items())
        )
        if not self._engines:
            raise PublicationFailed(
                f"no engine takes the new weights: {'; '.join(failed.values())}"
            )

    async def _out_after_a_failure(self, failed: Failures) -> None:
        try:
            await self._out(
                {engine: why for engine, why in failed.items() if engine in self._engines}
            )
        except PublicationFailed as error:  # recovery: the caller has given up already
            logger.warning("%s", error)

    # --- between the threads ----------------------------------------------------------------------

    def _call(self, work: Coroutine[Any, Any, T], limit: float | None = None) -> T:
        """Run `work` on the engines' loop and wait for it.

        Every step has its own limit; this one is for a loop that does not run.
        """
        if limit is None:
            limit = LAST_RESORT * (
                max(self._limit, self._pause_limit, self._comeback) + TRANSPORT_GRACE_S
            )
        return call_on(
            self._loop,
            work,
            limit,
            f"the engines' event loop did nothing for {limit:g} s: something blocks it",
        )
