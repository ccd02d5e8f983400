"""Which engine a request goes to: one that serves and has room, the least loaded, or the one that
knows its prefix.

Requests that find no room wait in line. Everything here happens on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlcore.errors import RlcoreError
from rlcore.interfaces import RolloutEngine
from rollout.fleet.health import Health, State

HOMES = 1 << 16  # conversations whose engine is remembered
# an engine with a cached prefix may have so many requests more than the least loaded one
SLACK = 4
RATIO = 1.25


@dataclass(eq=False)
class Member:
    """One engine of a fleet."""

    engine: RolloutEngine
    health: Health
    version: int | None = None  # of the weights that it serves
    leases: set[Lease] = field(default_factory=set)
    down: asyncio.Future[str] | None = None  # done when its present life has ended; the reason
    ending: asyncio.Task[None] | None = None  # what ends its last life

    @property
    def name(self) -> str:
        return self.engine.name


@dataclass(eq=False)
class Lease:
    """The right to give `member` one call. It is lost when the engine fails."""

    member: Member
    # of the member; what is lost in one says nothing about the next
    life: int
    requests: int = 1  # in the call
    lost: str | None = None  # why
    caller: asyncio.Task[Any] | None = None  # who awaits the call
    cut: bool = False  # we ended that

    def lose(self, why: str) -> None:
        self.lost = why
        self.cut_call()

    def cut_call(self) -> None:
        """End the call; whatever the engine still says is nobody's."""
        if self.caller is not None and not self.cut:
            self.cut = True
            self.caller.cancel()


@dataclass(eq=False)
class _Waiting:
    key: Hashable
    room: int
    granted: asyncio.Future[Lease]


class Router:
    """Leases of engines.

    Args:
        members: looked at each time; their states change behind our back, and `grant` is called
            then.
        hopeless: the error to raise where no member serves or ever will again, else None.
    """

    def __init__(
        self, members: Sequence[Member], hopeless: Callable[[], RlcoreError | None]
    ) -> None:
        self._members = members
        self._hopeless = hopeless
        self._waiting: deque[_Waiting] = deque()
        self._homes: dict[Hashable, Member] = {}

    async def lease(self, key: Hashable, *, room: int) -> Lease:
        """A serving engine with fewer than `room` calls; waits for one. Calls of one `key` share a
        prefix.

        Waits without a limit of its own: the caller has one. Raises NoEngineLeft.
        """
        if not self._waiting and (member := self._pick(key, room)) is not None:
            return self._give(member, key)
        if (error := self._hopeless()) is not None:
            raise error
        waiting = _Waiting(key, room, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            return await waiting.granted
        except asyncio.CancelledError:
            granted = waiting.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.release(granted.result())  # it came when nobody wanted it any more
            raise

    def release(self, lease: Lease) -> None:
        lease.member.leases.discard(lease)
        self.grant()

    def grant(self) -> None:
        """Serve those who wait, in their order, as far as there is room."""
        while self._waiting:
            first = self._waiting[0]
            if first.granted.done():  # cancelled
                self._waiting.popleft()
                continue
            member = self._pick(first.key, first.room)
            if member is not None:
                first.granted.set_result(self._give(member, first.key))
            elif (error := self._hopeless()) is not None:
                first.granted.set_exception(error)
            else:
                return
            self._waiting.popleft()

    @property
    def waiting(self) -> int:
        return sum(not waiting.granted.done() for waiting in self._waiting)

    def free(self, room: int) -> int:
        """Calls that would be granted at once, up to `room` a member."""
        free = sum(
            max(0, room - len(m.leases)) for m in self._members if m.health.state is State.SERVING
        )
        return max(0, free - self.waiting)

    def home(self, key: Hashable) -> str | None:
        """The engine that the newest call of `key` went to."""
        member = self._homes.get(key)
        return None if member is None else member.name

    def _give(self, member: Member, key: Hashable) -> Lease:
        lease = Lease(member, member.health.lives)
        member.leases.add(lease)
        self._homes.pop(key, None)  # to the end: the oldest are forgotten first
        self._homes[key] = member
        if len(self._homes) > HOMES:
            del self._homes[next(iter(self._homes))]
        return lease

    def _pick(self, key: Hashable, room: int) -> Member | None:
        free = [
            m for m in self._members if m.health.state is State.SERVING and len(m.leases) < room
        ]
        if not free:
            return None
        least = min(free, key=lambda member: len(member.leases))
        home = self._homes.get(key)
        return (
            home
            if home in free and len(home.leases) <= RATIO * len(least.leases) + SLACK
            else least
        )
