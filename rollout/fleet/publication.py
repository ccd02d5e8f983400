"""The steps of a publication of weights, on the event loop of the engines.

Rank 0 of the trainer calls it (rlcore/trainer/sender_ranks.py). The ranks send the bytes, and a
transport (rollout/weight_sync/base.py) makes the engines take them.

    open        pause, begin: an engine that fails here is left out
    send        the buckets: a failure raises PublicationFailed, and the caller runs the whole
                transaction again with the engines that are left
    finish      verify, end, set the version, resume

A failed engine gets no requests until it has received a complete publication.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rlcore.config import Config
from rlcore.config.derived import max_request_s, published_adapters
from rlcore.deadlines import ABORT_S
from rlcore.errors import PublicationFailed
from rlcore.interfaces import Orders, RankAddress, RolloutEngine
from rlcore.timeline.recorder import RECORDER, now
from rlcore.weights import Bucket
from rollout.fleet.fleet import Fleet
from rollout.weight_sync.base import Failures, Transport, ask
from rollout.weight_sync.choose import choose_transport

STAGES = ("publication", "stages")  # of the timeline

logger = logging.getLogger(__name__)


class WeightPublication:
    """Publishes weights to the engines of a fleet. Use it from the fleet's event loop."""

    def __init__(self, config: Config, fleet: Fleet) -> None:
        self._config = config
        self._fleet = fleet
        self._mode = config.rollout.on_update
        self._limit = config.rollout.engine.update_timeout_s
        self._probe = config.rollout.engine.health_timeout_s
        # In drain mode requests in flight end before an engine is paused; the fleet watches them.
        drains = self._mode == "drain"
        self._pause_limit = max_request_s(config) + ABORT_S if drains else self._limit
        # Those chosen so far, for weights (False) and for adapters (True); and the current one.
        self._transports: dict[bool, Transport] = {}
        self._transport: Transport | None = None
        # Of the current transaction, with its number and the begins of it and its stage.
        self._buckets: Sequence[Bucket] = ()
        self._engines: list[RolloutEngine] = []
        self._transactions = 0
        self._opened_at = 0.0
        self._stage_at = 0.0

    async def open(
        self,
        buckets: Sequence[Bucket],
        ranks: Sequence[RankAddress],
        only_stale: bool,
        is_base: bool = False,
    ) -> Orders | None:
        """Pause the engines, send them the layout, open the update; return the ranks' orders.

        None where `is_base`, and every engine holds the base.

        Raises PublicationFailed when no engine can be reached, RunFailed when none is left.

        Args:
            only_stale: publish only to the engines that wait for weights; the others keep serving.
            is_base: publish the weights below the adapters, to the engines that lack them.
        """
        fleet = self._fleet
        self._buckets = buckets
        self._transactions += 1
        self._opened_at = self._stage_at = now()
        self._engines = list(await fleet.stale() if only_stale else await fleet.candidates())
        if not self._engines:
            raise PublicationFailed("no engine waits for weights")
        if is_base:
            await self._keep_those_without_the_base()
            if not self._engines:
                return None
        for engine in self._engines:
            fleet.draining(engine)
        await self._step("health", lambda e: e.health(), self._probe)
        await self._step("pause", lambda e: e.pause(self._mode), self._pause_limit)
        await self._step("begin_update", lambda e: e.begin_update(buckets), self._limit)
        adapts = published_adapters(self._config) is not None and not is_base
        if adapts not in self._transports:
            self._transports[adapts] = choose_transport(
                self._config, self._engines, adapters=adapts
            )
        self._transport = self._transports[adapts]
        self._transport.ranks = ranks
        self._transport.has_all_engines = not (only_stale or is_base)
        await self._all_or_again(
            self._transport.open(self._engines, buckets), "the transport could not be opened"
        )
        self._record_stage(f"transport {self._transport.name}: open")
        return self._transport.orders()

    async def join(self, answers: Mapping[int, Any]) -> None:
        """Have the engines join the groups of the ranks, by the results of `BucketSender.open`."""
        await self._all_or_again(
            self._chosen.join(answers), "not all engines joined the trainer's ranks"
        )

    async def send(self, index: int, packed: Mapping[int, Any]) -> None:
        """Have the engines take a bucket, which the ranks begin to send.

        Raises PublicationFailed when an engine did not take this bucket or an earlier one.

        Args:
            packed: the results of `BucketSender.pack`, by rank.
        """
        await self._all_or_again(
            self._chosen.send(index, packed),
            f"not all engines took the weights up to bucket {index}",
        )
        self._record_stage(f"bucket {index}", bytes=self._buckets[index].num_bytes)

    async def stop(self) -> Any:
        """Return the last bucket that each rank still has to send after a failure."""
        return {} if self._transport is None else self._transport.stop()

    async def finish(self, version: int | None, result: Any) -> None:
        """Verify and close the update, and resume the engines on `version`.

        Without a version, after the base, they wait for adapters.

        Raises PublicationFailed when no engine is left.

        Args:
            result: rank 0's result of `BucketSender.finish`.
        """
        await self._all_or_again(self._chosen.complete(result), "not all engines took the weights")
        self._record_stage("complete")
        await self._step("end_update", lambda e: e.end_update(), self._limit)
        if version is None:
            for engine in self._engines:
                self._fleet.missed(engine)
            return
        await self._step("set_version", lambda e: e.set_version(version), self._limit)
        await self._step("resume", lambda e: e.resume(), self._limit)
        for engine in self._engines:
            self._fleet.published(engine, version)
        self._record_engines(self._engines, f"version {version}")
        args = {"publication": self._transactions, "engines": len(self._engines)}
        RECORDER.add(STAGES, f"version {version}", self._opened_at, now(), **args)

    async def cancel(self) -> None:
        """Cancel the transaction. The engines stay paused and refuse to generate until they have
        taken a whole update.
        """
        failed = {} if self._transport is None else await self._transport.give_up()
        try:
            await self._out(
                {engine: why for engine, why in failed.items() if engine in self._engines}
            )
        # recovery: the caller cancels already
        except PublicationFailed as error:
            logger.warning("%s", error)
        for engine in self._engines:
            self._fleet.missed(engine)
        self._record_engines(self._engines, "given up")

    async def close(self) -> None:
        """End the transport at the end of a run."""
        for transport in self._transports.values():
            await transport.close()

    # --- helpers ----------------------------------------------------------------------------------

    @property
    def _chosen(self) -> Transport:
        assert self._transport is not None, "open comes first"
        return self._transport

    def _record_stage(self, stage: str, **args: Any) -> None:
        """Record a stage of the transaction, which ends now."""
        ended = now()
        RECORDER.add(STAGES, stage, self._stage_at, ended, **args)
        self._stage_at = ended

    def _record_engines(self, engines: Sequence[RolloutEngine], outcome: str) -> None:
        """Record for how long the transaction has held these engines."""
        for engine in engines:
            track = (f"engine {engine.name}", "weights")
            RECORDER.add(track, outcome, self._opened_at, now(), publication=self._transactions)

    async def _keep_those_without_the_base(self) -> None:
        """Leave engines that hold the base out of the transaction, and in service."""
        answers = await ask(self._engines, "health", lambda e: e.health(), self._probe)
        for engine in answers.failed:
            # The fleet restarts an engine that fails in a publication, thus not one that serves.
            self._fleet.draining(engine)
        await self._out(answers.failed)
        self._engines = [e for e, found in answers.results.items() if not found.get("base")]

    async def _step(self, what: str, call: Callable[[Any], Awaitable[Any]], seconds: float) -> None:
        """Run one step on every engine, and take out those that fail."""
        # The stage begins here: in between, the trainer gathers weights.
        self._stage_at = now()
        answers = await ask(self._engines, what, call, seconds)
        self._record_stage(what, slowest=answers.slowest)
        await self._out(answers.failed)

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
        await asyncio.gather(*(self._fleet.out(engine, why) for engine, why in failed.items()))
        if not self._engines:
            raise PublicationFailed(
                f"no engine takes the new weights: {'; '.join(failed.values())}"
            )
