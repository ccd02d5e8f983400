"""Routing of requests: to the least loaded engine that serves, or to the one that knows the prefix.

Requests that find no room wait. Everything here happens on one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rlcore.errors import EngineFailed, RlcoreError
from rlcore.interfaces import RolloutEngine
from rollout.fleet.engine_states import Health, State

HOMES = 1 << 16  # conversations whose engine is remembered
# an engine with a cached prefix may have so many requests more than the least loaded one
SLACK = 4
RATIO = 1.25
AHEAD = 128  # callers that wait, among whom an engine looks for one whose prefix it has


@dataclass(eq=False)
class Member:
    """One engine of a fleet."""

    engine: RolloutEngine
    health: Health
    version: int | None = None  # of the weights that it serves
    leases: set[Lease] = field(default_factory=set)
    answers: int = 0  # calls that it answered so far
    held_s: float = 0.0  # in which a pause held its requests, so far
    down: asyncio.Future[str] | None = None  # done when it failed since its last start; the reason
    ending: asyncio.Task[None] | None = None  # ends it after its last failure

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def url(self) -> str | None:
        """Where it is reached; None if it is in this process, or does not run."""
        try:
            url: str | None = getattr(self.engine, "url", None)
        except EngineFailed:
            return None
        return url

    def describe(self) -> dict[str, Any]:
        """Return what `rlcore status` shows of it, JSON-able."""
        return {
            "engine": self.name,
            "url": self.url,
            "state": str(self.health.state),
            "version": self.version,
            "restarts": self.health.restarts,
            "requests": sum(lease.requests for lease in self.leases),
        }

    def has_room(self, room: int) -> bool:
        """Whether it serves and has fewer than `room` calls."""
        return self.health.state is State.SERVING and len(self.leases) < room


@dataclass(eq=False)
class Lease:
    """The right to give `member` one call. It is lost when the engine fails."""

    member: Member
    start: int  # the member's number of starts; a failure says nothing about the next start
    requests: int = 1  # in the call
    rids: Sequence[str] = ()  # their ids
    lost: str | None = None  # why
    caller: asyncio.Task[Any] | None = None  # the task that awaits the call
    cancelled: bool = False  # by us
    held_before_s: float = 0.0  # `member.held_s` when its time was last looked at
    overdue: bool = False  # its time is up: the call was aborted, which is not the engine's failure
    alarm: asyncio.TimerHandle | None = None  # of its time
    began: float = 0.0  # its call, by the clock of the timeline
    ended: float = 0.0

    def lose(self, why: str) -> None:
        """Take the lease back, because its engine failed."""
        self.lost = why
        self.cancel_call()

    def cancel_call(self) -> None:
        """Cancel the call; a later answer of the engine is dropped."""
        if self.caller is not None and not self.cancelled:
            self.cancelled = True
            self.caller.cancel()


@dataclass(eq=False)
class _Waiting:
    keys: Sequence[Hashable]
    room: int
    granted: asyncio.Future[Lease]


class Router:
    """Leases engines to callers.

    Args:
        members: the engines; the fleet changes their states, and calls `grant` then.
        no_engine_error: the error to raise where no member serves or ever will again, else None.
    """

    def __init__(
        self, members: Sequence[Member], no_engine_error: Callable[[], RlcoreError | None]
    ) -> None:
        self._members = members
        self._no_engine_error = no_engine_error
        self._waiting: deque[_Waiting] = deque()
        self._homes: dict[Hashable, Member] = {}
        # called when an engine may have room that it had not before
        self.on_room: Callable[[], None] = lambda: None

    async def lease(self, *keys: Hashable, room: int) -> Lease:
        """Wait for a serving engine with room for a call.

        There is no limit to the wait: the caller has one. Raises NoEngineLeft.

        Args:
            keys: calls with the same key share a prefix; the key of the longest comes first.
        """
        if not self._waiting and (member := self._pick(keys, room)) is not None:
            return self._give(member, keys)
        if (error := self._no_engine_error()) is not None:
            raise error
        waiting = _Waiting(keys, room, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            return await waiting.granted
        except asyncio.CancelledError:
            granted = waiting.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                self.release(granted.result())  # granted while it was cancelled
            raise

    def release(self, lease: Lease) -> None:
        """Give a lease back: its call has ended, however it did."""
        lease.member.leases.discard(lease)
        self.grant()

    def grant(self) -> None:
        """Lease engines to waiting callers as far as there is room.

        They are served in their order, except that an engine takes callers whose prefix it has
        first: where all are full, conversations would else go on anywhere.
        """
        while self._waiting:
            first = self._waiting[0]
            if first.granted.done():  # cancelled
                self._waiting.popleft()
                continue
            if self._pick(first.keys, first.room) is not None:
                near = islice(self._waiting, AHEAD)
                first = next(filter(self._can_stay, near), first)
                member = self._pick(first.keys, first.room)
                assert member is not None, "there is room"
                first.granted.set_result(self._give(member, first.keys))
            elif (error := self._no_engine_error()) is not None:
                first.granted.set_exception(error)
            else:
                break
            self._waiting.remove(first)
        self.on_room()

    def _can_stay(self, waiting: _Waiting) -> bool:
        """Whether the engine with the caller's prefix has room; any, if none has the prefix."""
        if waiting.granted.done():
            return False
        home = self._home_of(waiting.keys)
        if home is not None:
            return home.has_room(waiting.room)
        return any(member.has_room(waiting.room) for member in self._members)

    @property
    def waiting(self) -> int:
        """Callers that wait for a lease."""
        return sum(not waiting.granted.done() for waiting in self._waiting)

    def free(self, room: int) -> int:
        """The number of calls that would be granted at once, with up to `room` a member."""
        free = sum(
            max(0, room - len(m.leases)) for m in self._members if m.health.state is State.SERVING
        )
        return max(0, free - self.waiting)

    def home(self, key: Hashable) -> str | None:
        """The name of the engine that the newest call of `key` went to."""
        member = self._homes.get(key)
        return None if member is None else member.name

    def _give(self, member: Member, keys: Sequence[Hashable]) -> Lease:
        lease = Lease(member, member.health.starts)
        member.leases.add(lease)
        for key in keys:
            self._homes.pop(key, None)  # to the end: the oldest are forgotten first
            self._homes[key] = member
            if len(self._homes) > HOMES:
                del self._homes[next(iter(self._homes))]
        return lease

    def _pick(self, keys: Sequence[Hashable], room: int) -> Member | None:
        free = [member for member in self._members if member.has_room(room)]
        if not free:
            return None
        least = min(free, key=lambda member: len(member.leases))
        home = self._home_of(keys)
        return (
            home
            if home in free and len(home.leases) <= RATIO * len(least.leases) + SLACK
            else least
        )

    def _home_of(self, keys: Sequence[Hashable]) -> Member | None:
        """Return the engine that serves and has the longest prefix of a call."""
        home = next((self._homes[key] for key in keys if key in self._homes), None)
        return home if home is not None and home.health.state is State.SERVING else None
