"""Engines in other processes take each bucket as a broadcast: NCCL between different GPUs, else gloo.

Over gloo each engine has a group of its own with the trainer, so that one which hangs holds up nobody but itself. Over NCCL
all engines share one group, since the trainer's GPU then sends each byte once; it is made again whenever its members change.
When a member fails, our side aborts at once: the others get an error instead of waiting in the collective.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rlcore.errors import PublicationFailed, RunFailed
from rlcore.weights import Bucket
from rollout.engines.weight_group import Backend, GroupAddress, WeightGroup, gpu_identity, open_store
from rollout.transports.base import Answers, Engine, Failures, ask

JOIN_S = 60.0           # for all members to meet, at most


class GroupEngine(Protocol):
    """An engine that can be a member of a process group for weights."""

    name: str
    group_ranks: int        # how many of the group's ranks are its own: one each of its tensor-parallel ranks

    @property
    def ended(self) -> asyncio.Future[Any] | None:
        """Of its present life; another one in each."""
        ...

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        """Enter the group with the ranks from `rank` on, leaving the group before; returns when all members are there."""
        ...

    async def receive_bucket(self, index: int, flat: None) -> None: ...

    async def health(self) -> dict[str, Any]:
        """`gpu`: what tells its GPU from others', None on the CPU or where it shares one with the trainer."""
        ...


class DistributedTransport:
    """`rollout.transports.base.Transport` for every `GroupEngine`.

    Args:
        device: where the trainer's buckets are.
        host: the address under which the engines reach this process.
        timeout_s: for one bucket (`rollout.engine.update_timeout_s`).
        probe_s: for an answer to /health (`rollout.engine.health_timeout_s`).
    """

    name = "distributed"

    def __init__(self, *, device: torch.device, host: str, timeout_s: float, probe_s: float) -> None:
        self._device, self._host, self._timeout_s, self._probe_s = device, host, timeout_s, probe_s
        self._links: list[Link] = []

    async def open(self, engines: Sequence[Engine], buckets: Sequence[Bucket]) -> Failures:
        backend, failed = await self._backend(engines)
        if failed:
            return failed
        wanted = [[engine] for engine in engines] if backend == "gloo" else [list(engines)]
        kept = [link for link in self._links if link.members in wanted and link.is_open and link.backend == backend]
        await asyncio.gather(*(link.close() for link in self._links if link not in kept))
        self._links = kept + [
            Link(members, backend, self._device, self._host, timeout_s=self._timeout_s, probe_s=self._probe_s)
            for members in wanted if members not in [link.members for link in kept]
        ]
        return await self._on_links(lambda link: link.join())

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        return await self._on_links(lambda link: link.send(bucket, flat))

    async def complete(self) -> Failures:
        return {}

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links))
        self._links = []

    async def _on_links(self, step: Callable[[Link], Any]) -> Failures:
        """Raises PublicationFailed where a group broke and no engine can be blamed."""
        outcomes = await asyncio.gather(*(step(link) for link in self._links), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return {engine: why for failures in cast("list[Failures]", outcomes) for engine, why in failures.items()}

    async def _backend(self, engines: Sequence[Engine]) -> tuple[Backend, Failures]:
        """NCCL needs a GPU for each member; where one is shared, or there is none, gloo."""
        answers = await ask(engines, "health", lambda e: e.health(), self._probe_s)
        gpus = [gpu_identity(self._device), *(health["gpu"] for health in answers.results.values())]
        return choose_backend(gpus), answers.failed


def choose_backend(gpus: Sequence[str | None]) -> Backend:
    """Of the trainer's and each engine's GPU, None where there is none."""
    return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"


class Link:
    """One process group: the trainer as rank 0, then the ranks of its members."""

    def __init__(
        self, members: Sequence[Engine], backend: Backend, device: torch.device, host: str, *, timeout_s: float,
        probe_s: float,
    ) -> None:  # fmt: skip
        self.members, self.backend = list(members), backend
        self._device, self._host, self._timeout_s, self._probe_s = device, host, timeout_s, probe_s
        self._group: WeightGroup | None = None
        self._lives: list[Any] = []             # in which its members entered it

    @property
    def is_open(self) -> bool:
        """Not where a member was started again since: that one knows of no group."""
        return self._group is not None and self._group.is_open and self._lives == [engine.ended for engine in self.members]

    async def join(self) -> Failures:
        """Make the group unless it is there."""
        if self.is_open:
            return {}
        limit = min(self._timeout_s, JOIN_S)
        store, port = open_store(self._host, limit)
        ranks, size = {}, 1
        for engine in self.members:
            ranks[id(engine)] = size
            size += engine.group_ranks
        address = GroupAddress(self._host, port, size, self.backend, limit, f"weights-{secrets.token_hex(8)}")
        meeting = asyncio.ensure_future(asyncio.to_thread(WeightGroup, address, 0, device=self._device, store=store))
        answers = await ask(self.members, "join_group", lambda e: e.join_group(address, ranks[id(e)]), limit)
        try:
            self._group = await meeting
        except RunFailed as error:      # recovery: told as the fault of a member, or as the whole publication's
            return await self._blame(answers, error)
        if answers.failed:
            await self.close()
        self._lives = [engine.ended for engine in self.members]
        return answers.failed

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        group = self._group
        assert group is not None, "open the transport first"
        sending = asyncio.ensure_future(asyncio.to_thread(group.send, flat))
        answers = await ask(
            self.members, "receive_bucket", lambda e: e.receive_bucket(bucket.index, None), self._timeout_s,
            on_failure=group.close,
        )
        try:
            await sending
        except RunFailed as error:      # recovery: as above
            await self.close()
            return await self._blame(answers, error)
        return answers.failed

    async def close(self) -> None:
        if self._group is not None:
            await asyncio.to_thread(self._group.close)
            self._group = None

    async def _blame(self, answers: Answers, error: RunFailed) -> Failures:
        """The group broke, so every member failed; of several, those are to blame that do not answer any more."""
        if len(self.members) == 1:
            return answers.failed or {self.members[0]: str(error)}
        probes = await ask(self.members, "health", lambda e: e.health(), self._probe_s)
        if not probes.failed:
            raise PublicationFailed(f"{error}; {'; '.join(answers.failed.values())}")
        return {engine: answers.failed.get(engine, why) for engine, why in probes.failed.items()}
