"""Engines that join a run while it goes on, and leave it: the rollout service's side.

    the announcement is new        connect, check, take it in: stale, until it is sent the weights
    ... says that it leaves        take it out, then say so
    ... is gone                    take it out: `rlcore engine` has ended
    its restarts are used up       take it out, and say why

An engine that vanishes without a word is a dead one until then, as a server given by URL is: it is
asked again, and sent the weights if it answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rlcore import __version__
from rlcore.config import Config
from rlcore.deadlines import TRANSPORT_GRACE_S
from rlcore.errors import UserError
from rlcore.interfaces import RolloutEngine
from rollout.asyncio_utils import within
from rollout.engines.factories import Keys
from rollout.fleet.announcements import Announcement, EngineFolder, Verdict
from rollout.fleet.fleet import Fleet
from rollout.weight_sync.base import describe
from rollout.weight_sync.process_group import is_loopback

POLL_S = 1.0
WRITE_S = 10.0  # the longest age of what `rlcore status` is told of requests

Build = Callable[[str, str, Keys], RolloutEngine]
logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Guest:
    """An engine that has announced itself."""

    announcement: Announcement
    engine: RolloutEngine | None = None  # once it was taken in
    work: asyncio.Task[None] | None = None  # takes it in, or out
    leaves: bool = False


class Admission:
    """Takes engines that announce themselves into a fleet. Use it from the fleet's loop.

    Args:
        build: makes the engine of a name, a URL and keys.
        check: raises UserError where an engine that answers does not suit the run.
        host: the name of this machine.
    """

    def __init__(
        self,
        folder: EngineFolder,
        fleet: Fleet,
        config: Config,
        *,
        build: Build,
        check: Callable[[RolloutEngine], None],
        host: str,
    ) -> None:
        self._folder = folder
        self._fleet = fleet
        self._config = config
        self._build = build
        self._check = check
        self._host = host
        self._guests: dict[str, Guest] = {}  # by name
        self._odd: set[str] = set()  # the names of announcements that cannot be read
        self._written: tuple[float, list[Any], list[Any]] = (0.0, [], [])

    async def watch(self) -> None:
        """Look again and again, until cancelled."""
        try:
            while True:
                try:
                    await self.look()
                except OSError as error:  # recovery: a file server away for a while; the next look
                    logger.warning("%s cannot be used: %s", self._folder.path, error)
                await asyncio.sleep(POLL_S)
        finally:
            for guest in self._guests.values():
                if guest.work is not None:
                    guest.work.cancel()

    async def look(self) -> None:
        """Begin what the announcements ask for, and write the state of the fleet."""
        found = await asyncio.to_thread(self._folder.announced)
        for name, announcement in found.items():
            if announcement is None:
                self._tell_odd(name)
                continue
            self._odd.discard(name)
            guest = self._guests.get(name)
            if guest is None and announcement.leaving:  # it is out, or never was in
                await self._answer(announcement, "left")
            elif guest is None:
                guest = self._guests[name] = Guest(announcement)
                guest.work = self._begin(self._take_in(guest))
            elif guest.announcement.id != announcement.id or announcement.leaving:
                self._begin_leaving(guest)
        for name in self._guests.keys() - found.keys():
            self._begin_leaving(self._guests[name])
        self._give_up()
        await self._write()

    # --- in and out -------------------------------------------------------------------------------

    async def _take_in(self, guest: Guest) -> None:
        announcement = guest.announcement
        limit_s = self._config.rollout.engine.start_timeout_s + TRANSPORT_GRACE_S
        engine: RolloutEngine | None = None
        try:
            self._check_announcement(announcement)
            engine = self._build(announcement.name, announcement.url, announcement.keys)
            await within(limit_s, engine.start(), lambda: f"no answer within {limit_s:g} s")
            self._check(engine)
            self._check_name(announcement)  # another may have come meanwhile
            self._fleet.join(engine)
        except BaseException as error:
            if engine is not None:
                await engine.close()
            if not isinstance(error, Exception):  # it leaves already, or the run ends
                raise
            # recovery: the run goes on without it
            logger.warning("engine %s is not taken in: %s", announcement.name, describe(error))
            await self._answer(announcement, "refused", describe(error))
            return
        guest.engine = engine
        logger.info("engine %s at %s has joined the run", announcement.name, announcement.url)
        await self._answer(announcement, "joined")

    def _begin_leaving(self, guest: Guest) -> None:
        if not guest.leaves:
            guest.leaves = True
            before = guest.work
            guest.work = self._begin(self._take_out(guest, before))

    async def _take_out(
        self, guest: Guest, before: asyncio.Task[None] | None, why: str = ""
    ) -> None:
        """Take an engine out; another may then have its name.

        Args:
            before: the work that took it in.
            why: it is given up; else it has asked for it.
        """
        if before is not None and not before.done():
            before.cancel()
            await asyncio.wait({before})
        name = guest.announcement.name
        if guest.engine is not None:
            await self._fleet.leave(guest.engine)
            logger.info("engine %s has left the run%s", name, f": {why}" if why else "")
            guest.engine = None
        await self._answer(guest.announcement, "refused" if why else "left", why)
        if why:  # it stays known: else it would be taken in again
            guest.leaves = False
        else:
            del self._guests[name]

    def _give_up(self) -> None:
        for member in self._fleet.members:
            guest = self._guests.get(member.name)
            if guest is None or guest.engine is not member.engine or guest.leaves:
                continue
            if not member.health.can_come_back:
                guest.leaves = True
                why = f"{member.health.why} (rollout.engine.restart.limit)"
                guest.work = self._begin(self._take_out(guest, None, why))

    # --- checks -----------------------------------------------------------------------------------

    def _check_announcement(self, announcement: Announcement) -> None:
        """Raise UserError for an engine that cannot be reached, or is of another rlcore."""
        if announcement.rlcore != __version__:
            raise UserError(
                f"it was started by rlcore {announcement.rlcore}, expected {__version__}, the"
                " version of the run: use the same one"
            )
        parts = urlsplit(announcement.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"its URL is {announcement.url[:80]!r}, expected http://HOST:PORT")
        has_tls = self._config.cluster.tls is not None
        if has_tls != (parts.scheme == "https"):
            raise UserError(
                f"it speaks {parts.scheme} at {announcement.url}, and the run has cluster.tls"
                f" {'set' if has_tls else 'not set'}: give both the same"
            )
        if is_loopback(parts.hostname) and announcement.host != self._host:
            raise UserError(
                f"it listens on the loopback interface of {announcement.host}, and the run's"
                f" rollout service is on {self._host}: set rollout.engine.host to an address of"
                f" {announcement.host} that {self._host} reaches"
            )
        self._check_name(announcement)

    def _check_name(self, announcement: Announcement) -> None:
        for member in self._fleet.members:
            if member.name == announcement.name:
                raise UserError(f"the run has an engine {member.name} already")
            if member.url is not None and member.url.rstrip("/") == announcement.url.rstrip("/"):
                raise UserError(
                    f"{announcement.url} is in the run already, as engine {member.name}"
                )

    # --- files ------------------------------------------------------------------------------------

    async def _answer(self, announcement: Announcement, verdict: Verdict, why: str = "") -> None:
        try:
            await asyncio.to_thread(self._folder.answer, announcement, verdict, why)
        except OSError as error:  # recovery: `rlcore engine` waits no longer than its own limit
            logger.warning("engine %s could not be answered: %s", announcement.name, error)

    async def _write(self) -> None:
        rows = [member.describe() for member in self._fleet.members]
        states = [[row[name] for name in ("engine", "url", "state", "version")] for row in rows]
        at, before, states_before = self._written
        if states == states_before and (rows == before or time.monotonic() - at < WRITE_S):
            return
        await asyncio.to_thread(self._folder.write_fleet, rows)
        self._written = (time.monotonic(), rows, states)

    def _tell_odd(self, name: str) -> None:
        if name not in self._odd:
            self._odd.add(name)
            logger.warning("%s: the announcement %s cannot be read", self._folder.path, name)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)
