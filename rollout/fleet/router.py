"""Routes requests to the least loaded serving engine, or to the engine that has the prefix."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from rlcore.data.generation import GenerateRequest
from rlcore.errors import EngineFailed, RlcoreError
from rlcore.interfaces import RolloutEngine
from rollout.fleet.engine_states import Health, State

HOMES = 1 << 16  # conversations whose engine is remembered
# The engine with a cached prefix is preferred while it has at most RATIO * least + SLACK calls;
# `least` is the number at the least loaded engine.
SLACK = 4
RATIO = 1.25
AHEAD = 128  # waiting callers searched for one whose prefix is at an engine with room


@dataclass(eq=False)
class Member:
    """One engine of a fleet."""

    engine: RolloutEngine
    health: Health
    # Version of its weights.
    version: int | None = None
    leases: set[Lease] = field(default_factory=set)
    # Calls answered so far.
    answers: int = 0
    # Those in a row that did not fit their requests.
    invalid_answers: int = 0
    # Seconds so far in which a pause held its requests.
    held_s: float = 0.0
    # Reason of its failure since the last start.
    down: asyncio.Future[str] | None = None
    # Ends the engine after its last failure.
    ending: asyncio.Task[None] | None = None
    # Whether it is being taken out of the fleet.
    leaves: bool = False

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def num_requests(self) -> int:
        """Number of requests in its calls."""
        return sum(len(lease.requests) for lease in self.leases)

    def describe(self) -> dict[str, Any]:
        """Return the engine's row in `rlcore status`, JSON-able."""
        try:
            url = getattr(self.engine, "url", None)
        except EngineFailed:
            # It does not run.
            url = None
        return {
            "engine": self.name,
            "url": url,
            "state": str(self.health.state),
            "version": self.version,
            "restarts": self.health.restarts,
            "requests": self.num_requests,
        }

    def has_room(self, room: int) -> bool:
        """Whether the engine serves and has fewer than `room` calls."""
        return self.health.state is State.SERVING and len(self.leases) < room


@dataclass(eq=False)
class Lease:
    """The right to give `member` one call. It is lost when the engine fails.

    Attributes:
        start: the member's `starts` at the grant; a failure counts for this start only.
        lost: why the lease was lost.
        caller: the task that awaits the call; `cancelled` by `cancel_call`.
        held_before_s: `member.held_s` when the alarm of the time limit was set.
        overdue: the call passed its time limit, which is not the engine's failure.
        began, ended: times of the call.
    """

    member: Member
    start: int
    requests: Sequence[GenerateRequest] = ()
    lost: str | None = None
    caller: asyncio.Task[Any] | None = None
    cancelled: bool = False
    held_before_s: float = 0.0
    overdue: bool = False
    began: float = 0.0
    ended: float = 0.0
    alarm: asyncio.TimerHandle | None = None

    @property
    def rids(self) -> list[str]:
        """Ids of the requests."""
        return [request.rid for request in self.requests]

    def lose(self, why: str) -> None:
        """Revoke the lease, because its engine failed or left."""
        self.lost = why
        self.cancel_call()

    def cancel_call(self) -> None:
        """Cancel the call, and drop a later answer."""
        if self.caller is not None and not self.cancelled:
            self.cancelled = True
            self.caller.cancel()


@dataclass(eq=False)
class _Waiting:
    keys: Sequence[Hashable]
    room: int
    granted: asyncio.Future[Lease]
    avoid: Member | None = None


class Router:
    """Leases engines to callers.

    Args:
        members: the engines; the fleet calls `grant` after each change of their states.
        no_engine_error: returns the error to raise if no member can serve again, otherwise None.
    """

    def __init__(
        self, members: Sequence[Member], no_engine_error: Callable[[], RlcoreError | None]
    ) -> None:
        self._members = members
        self._no_engine_error = no_engine_error
        self._waiting: deque[_Waiting] = deque()
        self._homes: dict[Hashable, Member] = {}
        # Called when an engine may have gained room.
        self.on_room: Callable[[], None] = lambda: None

    async def lease(self, *keys: Hashable, room: int, avoid: Member | None = None) -> Lease:
        """Wait for a serving engine with room for a call.

        The caller limits the wait. Raises NoEngineLeft.

        Args:
            keys: calls with the same key share a prefix; the key of the longest prefix comes first.
            avoid: an engine that does not get the call while another one serves.
        """
        if not self._waiting and (member := self._pick(keys, room, avoid)) is not None:
            return self._give(member, keys)
        if (error := self._no_engine_error()) is not None:
            raise error
        waiting = _Waiting(keys, room, asyncio.get_running_loop().create_future(), avoid)
        self._waiting.append(waiting)
        try:
            return await waiting.granted
        except asyncio.CancelledError:
            granted = waiting.granted
            if granted.done() and not granted.cancelled() and granted.exception() is None:
                # The lease was granted while this task was being cancelled.
                self.release(granted.result())
            raise

    def release(self, lease: Lease) -> None:
        """Give a lease back after its call has ended in any way."""
        lease.member.leases.discard(lease)
        self.grant()

    def grant(self) -> None:
        """Lease engines to waiting callers as far as there is room.

        Callers are served in order, but an engine first takes callers whose prefix it has.
        Otherwise conversations would lose their engine whenever all engines are full.
        """

        def can_stay(waiting: _Waiting) -> bool:
            """Whether the engine with the caller's prefix has room, or any if none has it."""
            home = self._home_of(waiting.keys)
            home = None if home is waiting.avoid else home
            near = self._members if home is None else [home]
            return not waiting.granted.done() and any(m.has_room(waiting.room) for m in near)

        while self._waiting:
            first = self._waiting[0]
            # Skip cancelled callers.
            if first.granted.done():
                self._waiting.popleft()
                continue
            if self._pick(first.keys, first.room, first.avoid) is not None:
                chosen = next(filter(can_stay, islice(self._waiting, AHEAD)), first)
                member = self._pick(chosen.keys, chosen.room, chosen.avoid)
                # The other one may have to avoid the only engine with room.
                first = first if member is None else chosen
                member = member or self._pick(first.keys, first.room, first.avoid)
                assert member is not None, "there is room"
                first.granted.set_result(self._give(member, first.keys))
            elif (error := self._no_engine_error()) is not None:
                first.granted.set_exception(error)
            else:
                break
            self._waiting.remove(first)
        self.on_room()

    @property
    def waiting(self) -> int:
        """The number of callers that wait for a lease."""
        return sum(not waiting.granted.done() for waiting in self._waiting)

    def free(self, room: int) -> int:
        """The number of calls that would be granted now, with up to `room` for each member."""
        free = sum(
            max(0, room - len(m.leases)) for m in self._members if m.health.state is State.SERVING
        )
        return max(0, free - self.waiting)

    def home(self, key: Hashable) -> str | None:
        """The name of the engine that got the newest call of `key`."""
        member = self._homes.get(key)
        return None if member is None else member.name

    def _give(self, member: Member, keys: Sequence[Hashable]) -> Lease:
        lease = Lease(member, member.health.starts)
        member.leases.add(lease)
        for key in keys:
            # Move the key to the end, so that the oldest keys are dropped first.
            self._homes.pop(key, None)
            self._homes[key] = member
            if len(self._homes) > HOMES:
                del self._homes[next(iter(self._homes))]
        return lease

    def _pick(
        self, keys: Sequence[Hashable], room: int, avoid: Member | None = None
    ) -> Member | None:
        if avoid is not None and not any(
            member.health.state is State.SERVING for member in self._members if member is not avoid
        ):
            avoid = None
        free = [m for m in self._members if m is not avoid and m.has_room(room)]
        if not free:
            return None
        least = min(free, key=lambda member: len(member.leases))
        home = self._home_of(keys)
        stays = home in free and len(home.leases) <= RATIO * len(least.leases) + SLACK
        return home if stays else least

    def _home_of(self, keys: Sequence[Hashable]) -> Member | None:
        """Return the engine with the call's longest prefix, if it serves."""
        home = next((self._homes[key] for key in keys if key in self._homes), None)
        return home if home is not None and home.health.state is State.SERVING else None
