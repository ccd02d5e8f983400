"""Engines that join a run while it goes on, and leave it: the side of `rlcore engine --join`."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rlcore.deadlines import LEAVE_FLEET_S
from rlcore.errors import RunFailed, UserError
from rlcore.runs.directory import RunDirectory
from rollout.engines.factories import Keys
from rollout.fleet.announcements import Announcement, EngineFolder

POLL_S = 0.5
FINISHED = ("completed", "early_stopped")  # ends of a run after which it needs no engines


class Membership:
    """The engines of one command, in the run that they join.

    Args:
        run: the run's folder.
        keys: of these engines.
        say: prints a line.
    """

    def __init__(self, run: Path, keys: Keys, say: Callable[[str], None]) -> None:
        self._run = RunDirectory(run)
        self._folder = EngineFolder.of(run)
        self._keys = keys
        self._say = say
        self._waiting: list[Announcement] = []  # for an answer
        self._announced: list[Announcement] = []

    def announce(self, urls: Sequence[str]) -> None:
        """Announce engines that are ready. Raises UserError where the folder cannot be used."""
        self._folder.check()
        for url in urls:
            announcement = Announcement(engine_name(url), url, self._keys)
            self._folder.announce(announcement)
            self._announced.append(announcement)
            self._say(f"{announcement.name} at {url} asks to join {self._run.path}")
        self._waiting = list(self._announced)

    async def follow(self, _urls: Sequence[str] = ()) -> None:
        """Tell how the run answers. Returns when the run has finished.

        Raises:
            UserError: the run refuses an engine.
            RunFailed: the announcement of an engine was deleted, as by `--overwrite` of the run.
        """
        while not self.is_finished():
            for announcement in list(self._announced):
                self._look(announcement)
            await asyncio.sleep(POLL_S)
        self._say(f"{self._run.path} has finished")

    def _look(self, announcement: Announcement) -> None:
        answer = self._folder.answer_to(announcement)
        if answer is not None and answer.verdict == "refused":
            raise UserError(f"{self._run.path} refuses {announcement.name}: {answer.why}")
        if answer is not None and announcement in self._waiting:
            self._waiting.remove(announcement)
            self._say(
                f"{announcement.name} has joined: it gets the weights when the run waits for"
                " rollouts next"
            )
        if not self._folder.is_announced(announcement):
            raise RunFailed(
                f"{self._run.path} has no announcement of {announcement.name} any more: the run was"
                " deleted, or started anew"
            )

    async def leave(self) -> None:
        """Ask the run to go on without these engines; wait until it does, or is not there."""
        for announcement in self._announced:
            if self._folder.is_announced(announcement):
                self._folder.announce_leaving(announcement)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LEAVE_FLEET_S
        while staying := [one.name for one in self._announced if not self._has_left(one)]:
            if self.is_finished():
                return
            if loop.time() > deadline:
                self._say(
                    f"{self._run.path} has not let {', '.join(staying)} go within"
                    f" {LEAVE_FLEET_S:g} s: ending anyway"
                )
                return
            await asyncio.sleep(POLL_S)

    def withdraw(self) -> None:
        """Delete what was announced: these engines have ended."""
        for announcement in self._announced:
            self._folder.withdraw(announcement)

    def is_finished(self) -> bool:
        """Whether the run has ended well, and needs no engines any more."""
        result = self._run.read_result()
        return result is not None and result.get("status") in FINISHED

    def _has_left(self, announcement: Announcement) -> bool:
        answer = self._folder.answer_to(announcement)
        is_out = answer is not None and answer.verdict != "joined"
        return is_out or not self._folder.is_announced(announcement)


def engine_name(url: str) -> str:
    """Return the name in a run of an engine of this machine: no other has its host and port."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")
    return f"{host[:80] or 'engine'}-{urlsplit(url).port}"
