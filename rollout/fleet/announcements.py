"""The folder `engines/` of a run, through which engines join it and leave it.

    fleet.json           by the rollout service: the engines of the run, for `rlcore status`
    NAME.engine          by `rlcore engine --join`: where an engine is reached, and with which keys
    NAME.answer          by the rollout service: whether it was taken, and why not

The folder is for its owner's eyes alone (0700, as the keys in it need): whoever can write there is
the user of the run. Files are replaced whole. No clock is compared with another machine's.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson

from rlcore import __version__
from rlcore.config import Config
from rlcore.errors import UserError
from rlcore.runs.directory import RunDirectory
from rlcore.runs.files import write_atomic
from rollout.engines.factories import Keys, kind_of

FLEET = "fleet.json"
ANNOUNCEMENT = ".engine"
ANSWER = ".answer"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
MOST_BYTES = 1 << 20  # of one file

Verdict = Literal["joined", "refused", "left"]


@dataclass(frozen=True)
class Announcement:
    """An engine that wants to join a run.

    Attributes:
        name: of the engine in the run.
        keys: of this engine alone.
        host: the name of its machine.
        id: of this announcement; an engine that comes again under the same name has another one.
        leaving: it wants to be taken out.
        rlcore: the version of rlcore that started it.
    """

    name: str
    url: str
    keys: Keys
    host: str = field(default_factory=socket.gethostname)
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    leaving: bool = False
    rlcore: str = __version__


@dataclass(frozen=True)
class Answer:
    """What the rollout service made of an announcement."""

    id: str  # of the announcement
    verdict: Verdict
    why: str = ""


class EngineFolder:
    """The files of `engines/`.

    Args:
        path: the folder, in that of a run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, run: Path) -> EngineFolder:
        """The folder of a run, which need not exist."""
        return cls(RunDirectory(run).engines)

    def make(self) -> None:
        """Make the folder, unless it exists. Raises UserError where others may use it."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.check()

    def check(self) -> None:
        """Raise UserError unless the folder is there, ours, and nobody else's."""
        try:
            found = self.path.lstat()
        except OSError as error:
            raise UserError(
                f"{self.path}: no run takes engines there ({error.strerror}); expected the folder"
                " of a run that goes on, with rollout.engine.kind: sglang and engines of its own"
                " GPUs"
            ) from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise UserError(f"{self.path} is no folder of yours, and keys of engines go there")
        if found.st_mode & 0o077:
            raise UserError(
                f"{self.path} has mode {stat.S_IMODE(found.st_mode):o}, and keys of engines go"
                " there: expected 700 (chmod 700)"
            )

    # --- the engine's side ------------------------------------------------------------------------

    def announce(self, announcement: Announcement) -> None:
        """Write an announcement. Raises UserError where its name is taken."""
        path = self._path(announcement.name, ANNOUNCEMENT)
        try:
            # holds the name; what is read is the file that replaces it
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            raise UserError(
                f"{path} exists: an engine of that name has joined the run. If it is gone for good,"
                " delete the file"
            ) from None
        self._write(path, _encoded(announcement))

    def announce_leaving(self, announcement: Announcement) -> None:
        """Ask to be taken out of the run."""
        path = self._path(announcement.name, ANNOUNCEMENT)
        self._write(path, _encoded(replace(announcement, leaving=True)))

    def withdraw(self, announcement: Announcement) -> None:
        """Delete the announcement, and its answer."""
        for suffix in (ANNOUNCEMENT, ANSWER):
            self._path(announcement.name, suffix).unlink(missing_ok=True)

    def is_announced(self, announcement: Announcement) -> bool:
        """Whether the announcement is still there."""
        return self._path(announcement.name, ANNOUNCEMENT).exists()

    def answer_to(self, announcement: Announcement) -> Answer | None:
        """Return the answer to an announcement, None where there is none yet."""
        found = _read(self._path(announcement.name, ANSWER))
        if found is None or found.get("id") != announcement.id:
            return None
        return Answer(announcement.id, found["verdict"], str(found.get("why", "")))

    # --- the service's side -----------------------------------------------------------------------

    def announced(self) -> dict[str, Announcement | None]:
        """Return all announcements by name; None for one that is not whole, or that is no such."""
        return {
            path.name.removesuffix(ANNOUNCEMENT): _decoded(path)
            for path in sorted(self.path.glob(f"*{ANNOUNCEMENT}"))
            if NAME.fullmatch(path.name.removesuffix(ANNOUNCEMENT))
        }

    def answer(self, announcement: Announcement, verdict: Verdict, why: str = "") -> None:
        """Answer an announcement, if it is still there."""
        answer = Answer(announcement.id, verdict, why)
        if self.is_announced(announcement) and self.answer_to(announcement) != answer:
            self._write(self._path(announcement.name, ANSWER), orjson.dumps(asdict(answer)))

    def write_fleet(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write what `rlcore status` shows of the engines."""
        self._write(self.path / FLEET, orjson.dumps(list(rows)))

    def read_fleet(self) -> list[dict[str, Any]]:
        """Return what `write_fleet` wrote; [] where it did not yet."""
        try:
            rows: list[dict[str, Any]] = orjson.loads((self.path / FLEET).read_bytes())
        except (OSError, ValueError):
            return []
        return rows

    def _path(self, name: str, suffix: str) -> Path:
        return self.path / f"{name}{suffix}"

    @staticmethod
    def _write(path: Path, content: bytes) -> None:
        write_atomic(path, content, mode=0o600)


def why_closed(config: Config) -> str | None:
    """Why no engine can join a run of this configuration, None where one can."""
    engine = config.rollout.engine
    if not kind_of(engine.kind).standalone:
        return f"its rollout.engine.kind is {engine.kind!r}, and `rlcore engine` starts SGLang's"
    if engine.colocated:
        return "its engines take turns with the trainer (rollout.engine.colocated)"
    if engine.router_url is not None:
        return "its requests go through rollout.engine.router_url, which would not know the engine"
    return None


def describe_engine(row: Mapping[str, Any]) -> str:
    """Return the line of `rlcore status` about an engine, given what `Member.describe` returns."""
    place = f" at {row['url']}" if row.get("url") else ""
    joined = ", joined later" if row.get("joined") else ""
    return (
        f"{row['engine']}{place}: {row['state']}, version {row['version']},"
        f" {row['requests']} requests, {row['restarts']} restarts{joined}"
    )


def _encoded(announcement: Announcement) -> bytes:
    return orjson.dumps(asdict(announcement))


def _decoded(path: Path) -> Announcement | None:
    found = _read(path) or {}
    texts = [found.get(name) for name in ("name", "url", "host", "id", "rlcore")]
    keys = found.get("keys")
    if not all(isinstance(text, str) for text in texts) or not isinstance(keys, dict):
        return None
    name, url, host, id_, rlcore = map(str, texts)
    if f"{name}{ANNOUNCEMENT}" != path.name:
        return None
    pair = Keys(str(keys.get("api")), str(keys.get("admin")))
    return Announcement(name, url, pair, host, id_, bool(found.get("leaving")), rlcore)


def _read(path: Path) -> dict[str, Any] | None:
    """Return the object in a file; None where there is none."""
    try:
        with open(path, "rb") as file:
            found = orjson.loads(file.read(MOST_BYTES))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None
