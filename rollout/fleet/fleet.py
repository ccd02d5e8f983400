"""The engines of a run and what becomes of them: watched, declared failed once, started again,
served again.

`rollout/fleet/health.py` says which state follows from what. A failed engine is ended and, after a
pause, started again; then it is stale until a publication brings it a whole version. Everything
happens on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Hashable, Sequence
from typing import Any

from rlcore.config.derived import comeback_s
from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import NoEngineLeft
from rlcore.interfaces import RolloutEngine
from rollout.asyncio_utils import gather_or_cancel, within
from rollout.fleet.health import Event, Health, State
from rollout.fleet.restarts import watch
from rollout.fleet.router import Lease, Member, Router
from rollout.weight_sync.base import GRACE_S, describe

KILL_S = 30.0
RUNNING = (State.STALE, State.DRAINING, State.SERVING)

logger = logging.getLogger(__name__)


class Fleet:
    """All engines of a run, which it starts.

    Args:
        place_s: that one may need before its start; `start_timeout_s` counts from then.
    """

    def __init__(
        self, engines: Sequence[RolloutEngine], config: EngineConfig, *, place_s: float = 0.0
    ) -> None:
        self.members = [Member(engine, Health(config.restart)) for engine in engines]
        self._config = config
        self._place_s = place_s
        self.comeback_s = comeback_s(config, place_s)
        self._router = Router(self.members, self._hopeless)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()  # renewed at each change of a state
        self._may_start = asyncio.Event()  # restarts wait for it
        self._may_start.set()
        # called when an engine may have room that it had not before
        self.on_room: Callable[[], None] = lambda: None

    # --- life -------------------------------------------------------------------------------------

    async def start(self, *, again: bool = False) -> None:
        """Every engine answers, and is stale. Raises what the first one that does not start raised.

        Args:
            again: in the place of a fleet that may have gone on without some. One that answers is
                enough, the others come as those that failed do; raises as `candidates` where none
                does.
        """
        if not again:
            await gather_or_cancel(*(self._bring_up(member) for member in self.members))
            return
        for member in self.members:
            self._spawn(self._start_again(member))
        await asyncio.sleep(0)  # all are starting
        await self.candidates()

    async def close(self) -> None:
        """Stop watching and restarting; the engines are closed by whoever made them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=KILL_S)

    # --- requests ---------------------------------------------------------------------------------

    async def lease(self, key: Hashable, *, room: int) -> Lease:
        """See `Router.lease`."""
        return await self._router.lease(key, room=room)

    def release(self, lease: Lease) -> None:
        """The call has ended, however it did."""
        self._router.release(lease)
        self.on_room()

    def free(self, room: int) -> int:
        """See `Router.free`."""
        return self._router.free(room)

    @property
    def busy(self) -> bool:
        """Whether an engine has a call, or a call waits for one."""
        return self._router.waiting > 0 or any(member.leases for member in self.members)

    def home(self, key: Hashable) -> str | None:
        """See `Router.home`."""
        return self._router.home(key)

    def lost(self, lease: Lease, why: str) -> None:
        """The engine failed the call that the lease was for."""
        if lease.life == lease.member.health.lives:
            self._fail(lease.member, why)

    # --- publication ------------------------------------------------------------------------------

    async def candidates(self) -> list[RolloutEngine]:
        """All engines that run, to take a whole publication. Where none does, waits for one that
        comes back.

        Raises NoEngineLeft when none can, or does in time.
        """
        deadline = time.monotonic() + self.comeback_s
        while not (running := self._in(*RUNNING)):
            if (error := self._hopeless()) is not None:
                raise error
            if not self._may_start.is_set():
                raise NoEngineLeft(
                    "no engine runs, and none is started while the trainer is on its GPUs:"
                    f" {self._ends()}"
                )
            if not await self._change(deadline - time.monotonic()):
                keys = f"{'cluster.start_timeout_s, ' if self._place_s else ''}rollout.engine.start_timeout_s"
                raise NoEngineLeft(
                    f"no engine came back within {self.comeback_s:g} s ({keys}): {self._ends()}"
                )
        return running

    async def stale(self) -> list[RolloutEngine]:
        """Those that run and wait for weights."""
        return self._in(State.STALE)

    async def someone_waits(self) -> None:
        """Returns once an engine waits for weights; on a shared device, where no other serves: its
        requests would be lost.
        """
        while not self._in(State.STALE) or (self._config.colocated and self._in(State.SERVING)):
            await self._change(None)

    def draining(self, engine: RolloutEngine) -> None:
        """It takes part in a publication: no more requests from now on. Say it before it is paused."""
        self._on(engine, Event.DRAIN)

    def published(self, engine: RolloutEngine, version: int) -> None:
        """It has the whole `version` and was resumed. One that failed in the meantime stays dead."""
        if self._on(engine, Event.PUBLISHED):
            self._member(engine).version = version

    def missed(self, engine: RolloutEngine) -> None:
        """The publication was given up while it took part."""
        self._on(engine, Event.MISSED)

    async def out(self, engine: RolloutEngine, why: str) -> None:
        """It failed a step of a publication. Returns when it is ended, and holds up nobody any
        more.

        Where it died in the middle and runs again by now, that was said of its last life, and the
        new one goes on.
        """
        if self._member(engine).health.state in (State.DRAINING, State.DEAD):
            await self.failed(engine, why)

    async def failed(self, engine: RolloutEngine, why: str) -> None:
        """It failed what it was asked for in its present life; once is enough. Returns when it is
        ended.
        """
        member = self._member(engine)
        self._fail(member, why)
        if member.ending is not None:
            await asyncio.wait({member.ending})

    # --- a shared device --------------------------------------------------------------------------

    async def hold(self) -> None:
        """Start nobody any more until `let_go`, for want of memory; returns when nobody is
        starting.
        """
        self._may_start.clear()
        while self._in(State.STARTING):
            await self._change(None)

    def let_go(self) -> None:
        """Engines that died are started again."""
        self._may_start.set()

    @property
    def running(self) -> list[RolloutEngine]:
        return self._in(*RUNNING)

    @property
    def in_service(self) -> list[RolloutEngine]:
        return self._in(State.SERVING)

    # --- what there is ----------------------------------------------------------------------------

    @property
    def engines(self) -> list[RolloutEngine]:
        return [member.engine for member in self.members]

    @property
    def serving(self) -> int:
        return len(self._in(State.SERVING))

    @property
    def restarts(self) -> int:
        """Of all engines, so far."""
        return sum(member.health.restarts for member in self.members)

    def waiting_for(self) -> str:
        """ "engine a (3 requests), engine b (1 request)", then what is missing, or "" when nothing
        is asked of anybody.
        """
        counts = [
            (member.name, sum(lease.requests for lease in member.leases)) for member in self.members
        ]
        parts = [f"engine {name} ({n} request{'s' * (n != 1)})" for name, n in counts if n]
        if self._router.waiting:
            states = ", ".join(f"{member.name} is {member.health.state}" for member in self.members)
            parts.append(f"an engine with room ({states})")
        return ", ".join(parts)

    def _in(self, *states: State) -> list[RolloutEngine]:
        return [member.engine for member in self.members if member.health.state in states]

    def _member(self, engine: RolloutEngine) -> Member:
        return next(member for member in self.members if member.engine is engine)

    def _hopeless(self) -> NoEngineLeft | None:
        if any(member.health.can_come_back for member in self.members):
            return None
        return NoEngineLeft(
            "no engine is left, and none can be started again (rollout.engine.restart):"
            f" {self._ends()}"
        )

    def _ends(self) -> str:
        """Of those that do not run, and why not."""
        words = {State.DEAD: "", State.STARTING: "it is starting; before, "}
        return "; ".join(
            f"engine {m.name}: {words[m.health.state]}{m.health.why}"
            for m in self.members
            if m.health.state in words
        )

    # --- changes of state -------------------------------------------------------------------------

    def _on(self, engine: RolloutEngine, event: Event) -> bool:
        """An event of a publication; False where it comes too late, the engine having failed since."""
        member = self._member(engine)
        if not member.health.accepts(event):
            return False
        member.health.on(event)
        self._tell()
        return True

    def _fail(self, member: Member, why: str) -> None:
        if member.health.state in RUNNING:  # else it is said already
            self._bury(member, why)

    def _bury(self, member: Member, why: str) -> None:
        health = member.health
        health.on(Event.FAIL, why)
        member.version = None
        left = health.restart.limit - health.restarts
        next_ = (
            f"it is started again in {health.pause_s:g} s"
            if left > 0
            else "it is given up (rollout.engine.restart.limit)"
        )
        logger.warning("engine %s failed: %s; %s", member.name, why, next_)
        for lease in list(member.leases):
            lease.lose(f"engine {member.name} failed: {why}")
        if member.down is not None and not member.down.done():
            member.down.set_result(why)
        member.ending = self._spawn(self._end(member))
        self._spawn(self._revive(member, member.ending))
        self._tell()

    def _tell(self) -> None:
        self._router.grant()
        self.on_room()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, seconds: float | None) -> bool:
        """Wait for the next change of a state; False when none came in time."""
        waiting = asyncio.ensure_future(self._changed.wait())
        try:
            done, _ = await asyncio.wait(
                {waiting}, timeout=None if seconds is None else max(0.0, seconds)
            )
        finally:
            waiting.cancel()
        return bool(done)

    # --- restarts, health -------------------------------------------------------------------------

    async def _bring_up(self, member: Member) -> None:
        limit = self._config.start_timeout_s
        engine = member.engine
        member.health.on(Event.START)
        await within(
            self._place_s + limit + GRACE_S,
            engine.start(),
            lambda: (
                f"engine {engine.name} was not ready after {limit:g} s"
                " (rollout.engine.start_timeout_s)"
            ),
        )
        member.health.on(Event.UP)
        member.down = asyncio.get_running_loop().create_future()
        self._spawn(watch(member, member.down, self._config, self._fail))
        self._tell()

    async def _end(self, member: Member) -> None:
        try:
            await within(
                KILL_S,
                member.engine.kill(),
                lambda: f"engine {member.name} could not be ended within {KILL_S:g} s",
            )
        except Exception as error:  # noqa: BLE001 - recovery: a new life does not need the end of the old one
            logger.warning("%s", describe(error))

    async def _revive(self, member: Member, ending: asyncio.Task[None]) -> None:
        """Once its last life has ended: wait, and start it again."""
        await asyncio.wait({ending})
        if not member.health.can_come_back:
            return
        await asyncio.sleep(member.health.pause_s)
        await self._may_start.wait()
        await self._start_again(member)

    async def _start_again(self, member: Member) -> None:
        try:
            await self._bring_up(member)
        except Exception as error:  # noqa: BLE001 - recovery: another restart, or it is given up
            self._bury(
                member,
                f"it did not start{' again' * bool(member.health.restarts)}: {describe(error)}",
            )
            return
        if member.health.restarts:
            logger.info("engine %s runs again (restart %d)", member.name, member.health.restarts)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
