"""The engines of a run: starting, watching and restarting them, on one event loop.

`rollout/fleet/engine_states.py` defines which state follows from which event. A failed engine is
ended and, after a pause, started again; it is then stale until it takes part in a publication.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from rlcore.config.derived import restart_timeout_s
from rlcore.config.sections.rollout import EngineConfig
from rlcore.deadlines import ABORT_S, KILL_ENGINE_S, TRANSPORT_GRACE_S
from rlcore.errors import EngineFailed, InvalidAnswer, NoEngineLeft, UserError
from rlcore.interfaces import RolloutEngine
from rollout.asyncio_utils import gather_or_cancel, within
from rollout.fleet.engine_list import EngineList
from rollout.fleet.engine_states import Event, Health, ProgressClock, State
from rollout.fleet.probes import Probes, standstill
from rollout.fleet.router import Lease, Member, Router
from rollout.weight_sync.base import describe

RUNNING = (State.STALE, State.DRAINING, State.SERVING)
# The next abort ends a request that reached the engine after this one.
ABORT_AGAIN_S = 0.2
MAX_INVALID = 3  # answers in a row that do not fit their requests, after which an engine restarts
SHOWN = 5  # departed engines listed in an error

logger = logging.getLogger(__name__)


class Fleet:
    """All engines of a run. `router` leases them to callers.

    Args:
        placement_timeout_s: how long an engine may wait for its place before its start counts.
        listed: the list of engines, if it may change.
        check: raises UserError for a started engine that does not suit the run.
    """

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        config: EngineConfig,
        *,
        placement_timeout_s: float = 0.0,
        listed: EngineList | None = None,
        check: Callable[[RolloutEngine], None] = lambda engine: None,
    ) -> None:
        self.members = [Member(engine, Health(config.restart)) for engine in engines]
        self._config = config
        self._placement_timeout_s = placement_timeout_s
        self._listed = listed
        self._check = check
        self.restart_timeout_s = restart_timeout_s(config, placement_timeout_s)
        self.router = Router(self.members, self._no_engine_error)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._may_start = asyncio.Event()
        self._may_start.set()
        self._departed: list[str] = []
        self._departed_restarts = 0

    # --- start and end ----------------------------------------------------------------------------

    async def start(self, *, again: bool = False) -> None:
        """Start every engine; they are stale then. Raises the error of the first failed start.

        `again` says that this fleet replaces one that may have lost engines: one running engine is
        enough, and failed ones are restarted. Raises as `candidates` does if none runs.
        """
        if not again:
            await gather_or_cancel(*(self._bring_up(member) for member in self.members))
            return
        for member in self.members:
            self._spawn(self._start_again(member))
        # Let every start begin, so that `candidates` sees engines that are starting.
        await asyncio.sleep(0)
        await self.candidates()

    async def close(self) -> None:
        """Stop watching and restarting. The service closes the engines."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=KILL_ENGINE_S)

    # --- engines that join and leave --------------------------------------------------------------

    def join(self, engine: RolloutEngine) -> None:
        """Add an engine and start it. It is stale then, like the others after their start."""
        member = Member(engine, Health(self._config.restart))
        self.members.append(member)
        self._spawn(self._start_again(member))

    async def leave(self, engine: RolloutEngine) -> None:
        """Take an engine out of the fleet and disconnect from it. No-op if it has left or leaves.

        Its requests in flight are aborted and continue at other engines from the tokens made so
        far. Its start or a publication in progress ends first.
        """
        member = self._find(engine)
        if member is None or member.leaves:
            return
        member.leaves = True
        while member.health.state in (State.DRAINING, State.STARTING):
            await self._change(None)
        if member.health.accepts(Event.LEAVE):
            member.health.on(Event.LEAVE)
            self._state_changed()
            await self._take_requests_back(member)
        self.members.remove(member)
        self._departed.append(member.name)
        self._departed_restarts += member.health.restarts
        if member.down is not None and not member.down.done():
            member.down.set_result("it has left")
        late = f"engine {member.name} could not be disconnected within {KILL_ENGINE_S:g} s"
        if (why := await _error(engine.close, KILL_ENGINE_S, late)) is not None:
            logger.warning("%s", why)
        self._state_changed()

    async def _take_requests_back(self, member: Member) -> None:
        """Abort an engine's requests until it has none; unanswered ones are sent again."""
        deadline = time.monotonic() + ABORT_S
        while member.leases and (left := deadline - time.monotonic()) > 0:
            rids = [rid for lease in member.leases for rid in lease.rids]
            abort = partial(member.engine.abort, rids)
            # recovery: without an answer only the tokens made so far are lost
            if (why := await _error(abort, left, "no answer to an abort")) is not None:
                logger.warning("engine %s leaves: %s", member.name, why)
                break
            await asyncio.sleep(min(left, ABORT_AGAIN_S))
        for lease in list(member.leases):
            lease.lose(f"engine {member.name} has left")

    # --- requests ---------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether an engine has a call, or a call waits for one."""
        return self.router.waiting > 0 or any(member.leases for member in self.members)

    def lost(self, lease: Lease, error: EngineFailed) -> None:
        """Report that the engine failed the call of this lease.

        An answer that does not fit its request may be the request's fault; several in a row are
        the engine's.
        """
        member = lease.member
        if lease.start != member.health.starts:
            return
        member.invalid_answers += isinstance(error, InvalidAnswer)
        # The last attempt comes after a restart.
        limit = min(MAX_INVALID, max(1, self._config.retries))
        if isinstance(error, InvalidAnswer) and member.invalid_answers < limit:
            logger.warning("%s", error)
            return
        self._fail(member, str(error))

    # --- publication ------------------------------------------------------------------------------

    async def candidates(self) -> list[RolloutEngine]:
        """All running engines, for a whole publication. Waits for a restart if none runs.

        Reads the list of engines again first, if it may change. Raises NoEngineLeft when no engine
        can be restarted, or none restarts in time.
        """
        if self._listed is not None:
            await self._follow(self._listed)
        deadline = time.monotonic() + self.restart_timeout_s
        while not (running := self.in_state(*RUNNING)):
            if (error := self._no_engine_error()) is not None:
                raise error
            if not self._may_start.is_set():
                raise NoEngineLeft(
                    "no engine runs, and none is started while the trainer is on its GPUs:"
                    f" {self._ends()}"
                )
            if not await self._change(deadline - time.monotonic()):
                cluster_key = "cluster.start_timeout_s, " if self._placement_timeout_s else ""
                keys = f"{cluster_key}rollout.engine.start_timeout_s"
                limit = f"{self.restart_timeout_s:g} s ({keys})"
                raise NoEngineLeft(f"no engine came back within {limit}: {self._ends()}")
        return running

    async def _follow(self, listed: EngineList) -> None:
        """Add the engines that are new in the list, and remove those that it lacks."""
        try:
            named = await asyncio.to_thread(listed.read)
        # recovery: the engines stay as they are until the next publication
        except UserError as error:
            logger.warning("%s; the engines stay as they are", error)
            return
        known = {member.name for member in self.members}
        for member in self.members:
            if member.name not in named and not member.leaves:
                logger.info("engine %s leaves: it is not in %s any more", member.name, listed.path)
                self._spawn(self.leave(member.engine))
            elif member.health.may_try_again(time.monotonic()):
                logger.info("engine %s is still in the list: it is started again", member.name)
                self._spawn(self._start_again(member))
        for name, url in named.items():
            if name not in known:
                logger.info("engine %s is new in %s", name, listed.path)
                self.join(listed.build(name, url))
        # Let the departures begin, so that this publication does without these engines.
        await asyncio.sleep(0)

    async def stale(self) -> list[RolloutEngine]:
        """The running engines that wait for weights."""
        return self.in_state(State.STALE)

    async def wait_for_stale(self) -> None:
        """Return once an engine waits for weights.

        On a shared device also wait until no engine serves: its requests would be lost.
        """
        while not self.in_state(State.STALE) or (
            self._config.colocated and self.in_state(State.SERVING)
        ):
            await self._change(None)

    def draining(self, engine: RolloutEngine) -> None:
        """Send an engine no more requests: it takes part in a publication."""
        self._on(engine, Event.DRAIN)

    def published(self, engine: RolloutEngine, version: int) -> None:
        """Put an engine that took `version` into service. No-op if it has failed meanwhile."""
        member = self._on(engine, Event.PUBLISHED)
        if member is not None:
            member.version = version

    def missed(self, engine: RolloutEngine) -> None:
        """Mark an engine stale: the publication in which it took part was cancelled."""
        self._on(engine, Event.MISSED)

    async def out(self, engine: RolloutEngine, why: str) -> None:
        """As `failed`, for a step of a publication; no-op for an engine that restarted since."""
        member = self._find(engine)
        if member is not None and member.health.state in (State.DRAINING, State.DEAD):
            await self.failed(engine, why)

    async def failed(self, engine: RolloutEngine, why: str) -> None:
        """End an engine that failed since its last start. Returns when it is ended."""
        member = self._find(engine)
        if member is None:
            return
        if member.health.state in RUNNING:
            self._fail(member, why)
        if member.ending is not None:
            await asyncio.wait({member.ending})

    # --- a shared device --------------------------------------------------------------------------

    async def pause_starts(self) -> None:
        """Start no engine until `resume_starts`. Returns when no engine is starting."""
        self._may_start.clear()
        while self.in_state(State.STARTING):
            await self._change(None)

    def resume_starts(self) -> None:
        """Start failed engines again."""
        self._may_start.set()

    # --- state of the fleet -----------------------------------------------------------------------

    @property
    def engines(self) -> list[RolloutEngine]:
        return [member.engine for member in self.members]

    @property
    def max_total_tokens(self) -> int | None:
        """The smallest limit on prompt and response tokens; None if no engine reports one."""
        limits = [getattr(engine, "max_total_tokens", None) for engine in self.engines]
        return min((tokens for tokens in limits if tokens is not None), default=None)

    @property
    def serving(self) -> int:
        return len(self.in_state(State.SERVING))

    @property
    def restarts(self) -> int:
        """Restarts of all engines so far."""
        return self._departed_restarts + sum(member.health.restarts for member in self.members)

    def describe_wait(self) -> str:
        """Describe pending work as "engine a (3 requests), engine b (1 request)"; "" if none."""
        parts = [
            f"engine {member.name} ({n} request{'s' * (n != 1)})"
            for member in self.members
            if (n := member.num_requests)
        ]
        if self.router.waiting:
            states = ", ".join(f"{member.name} is {member.health.state}" for member in self.members)
            parts.append(f"an engine with room ({states})")
        return ", ".join(parts)

    def in_state(self, *states: State) -> list[RolloutEngine]:
        """The engines in any of the given states."""
        return [member.engine for member in self.members if member.health.state in states]

    def _find(self, engine: RolloutEngine) -> Member | None:
        """Return the engine's member; None if it has left."""
        return next((member for member in self.members if member.engine is engine), None)

    def _no_engine_error(self) -> NoEngineLeft | None:
        if any(member.health.can_come_back for member in self.members):
            return None
        return NoEngineLeft(
            "no engine is left, and none can be started again (rollout.engine.restart):"
            f" {self._ends()}"
        )

    def _ends(self) -> str:
        """Why each engine is not running, as one line for an error message."""
        prefixes = {State.DEAD: "", State.STARTING: "it is starting; before, "}
        ends = [
            f"engine {m.name}: {prefixes[m.health.state]}{m.health.why}"
            for m in self.members
            if m.health.state in prefixes
        ]
        return "; ".join([*ends, *(f"engine {name} has left" for name in self._departed[-SHOWN:])])

    # --- changes of state -------------------------------------------------------------------------

    def _on(self, engine: RolloutEngine, event: Event) -> Member | None:
        """Apply an event of a publication. Returns None if the engine has failed or left."""
        member = self._find(engine)
        if member is None or not member.health.accepts(event):
            return None
        member.health.on(event)
        self._state_changed()
        return member

    def _fail(self, member: Member, why: str) -> None:
        """End an engine, and start it again if it may. No-op if it is dead already, or leaves."""
        health = member.health
        if not health.accepts(Event.FAIL):
            return
        health.on(Event.FAIL, why, now=time.monotonic())
        member.version = None
        next_ = (
            f"it is started again in {health.pause_s:g} s"
            if health.restarts_left > 0
            else "it is given up (rollout.engine.restart.limit)"
        )
        logger.warning("engine %s failed: %s; %s", member.name, why, next_)
        for lease in list(member.leases):
            lease.lose(f"engine {member.name} failed: {why}")
        if member.down is not None and not member.down.done():
            member.down.set_result(why)
        member.ending = self._spawn(self._end(member))
        self._spawn(self._restart(member, member.ending))
        self._state_changed()

    def _state_changed(self) -> None:
        self.router.grant()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, seconds: float | None) -> bool:
        """Wait for the next change of a state. Returns False after `seconds` without one."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    # --- restarts and health ----------------------------------------------------------------------

    async def _bring_up(self, member: Member) -> None:
        limit = self._config.start_timeout_s
        engine = member.engine
        member.health.on(Event.START, now=time.monotonic())
        member.invalid_answers = 0
        await within(
            self._placement_timeout_s + limit + TRANSPORT_GRACE_S,
            engine.start(),
            lambda: (
                f"engine {engine.name} was not ready after {limit:g} s"
                " (rollout.engine.start_timeout_s)"
            ),
        )
        self._check(engine)
        member.health.on(Event.UP)
        member.down = asyncio.get_running_loop().create_future()
        self._spawn(self._watch(member, member.down))
        self._state_changed()

    async def _watch(self, member: Member, down: asyncio.Future[str]) -> None:
        """Probe an engine and watch its process, until `down` is done.

        During a publication, which has its own deadlines, failed probes do not count.
        """
        ended = member.engine.ended
        probes = Probes(member.engine, lambda: member.answers, self._config.health_timeout_s)
        clock = ProgressClock(time.monotonic())
        signs: set[asyncio.Future[Any]] = {down} if ended is None else {down, ended}
        while not down.done():
            await asyncio.wait(
                signs, timeout=self._config.health_every_s, return_when=asyncio.FIRST_COMPLETED
            )
            gone = ended is not None and ended.done()
            if down.done():
                continue
            if gone or member.health.state is not State.DRAINING:
                why = await probes.fault(at_once=gone)
                if down.done():
                    continue
                if gone or (why and member.health.state is not State.DRAINING):
                    self._fail(member, why or "its process ended")
                    continue
            why = await standstill(member, clock, self._config)
            if why is not None and not down.done():
                self._fail(member, why)

    async def _end(self, member: Member) -> None:
        late = f"engine {member.name} could not be ended within {KILL_ENGINE_S:g} s"
        # recovery: a new process can start before the old one has ended
        if (why := await _error(member.engine.kill, KILL_ENGINE_S, late)) is not None:
            logger.warning("%s", why)

    async def _restart(self, member: Member, ending: asyncio.Task[None]) -> None:
        """Start a dead engine again after its process has ended, and a pause."""
        await asyncio.wait({ending})
        if not member.health.can_come_back:
            return
        await asyncio.sleep(member.health.pause_s)
        await self._may_start.wait()
        if member in self.members:
            await self._start_again(member)

    async def _start_again(self, member: Member) -> None:
        try:
            await self._bring_up(member)
        except Exception as error:  # noqa: BLE001 - recovery: another restart, or it is given up
            again = " again" if member.health.restarts else ""
            self._fail(member, f"it did not start{again}: {describe(error)}")
            return
        if member.health.restarts:
            logger.info("engine %s runs again (restart %d)", member.name, member.health.restarts)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _error(call: Callable[[], Awaitable[Any]], seconds: float, late: str) -> str | None:
    """Why the call failed, or `late` if it took more than `seconds`; None if it succeeded."""
    try:
        await within(seconds, call(), lambda: late)
    except Exception as error:  # noqa: BLE001 - any error is a failure of the engine
        return describe(error)
    return None
