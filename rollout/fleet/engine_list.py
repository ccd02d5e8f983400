"""Files about a run's engines: the list of engines that may change, and the states of all."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson

from rlcore.config import Config
from rlcore.config.checks.engine import url_problem
from rlcore.errors import ConfigError, UserError
from rlcore.interfaces import RolloutEngine
from rlcore.runs.files import write_atomic
from rollout.engines.factories import factory_of
from rollout.fleet.router import Member

KEY = "rollout.engine.urls_file"
SHOW_S = 1.0
logger = logging.getLogger(__name__)


class EngineList:
    """A JSON file with a list of URLs, or a folder with one such file for each command."""

    def __init__(self, config: Config) -> None:
        assert config.rollout.engine.urls_file is not None
        self.path = Path(config.rollout.engine.urls_file)
        self._config = config
        self._factory = factory_of(config.rollout.engine.kind)

    def read(self) -> dict[str, str]:
        """Return the URL of each engine by its name, which is made of the URL.

        Raises:
            UserError: a file cannot be read, is not a list of URLs, or may have been written by
                others, who would get the engines' keys; or two URLs give one name.
        """
        found: dict[str, str] = {}
        is_folder = self.path.is_dir()
        if is_folder:
            _check_owner(self.path)
        for path in sorted(self.path.glob("*.json")) if is_folder else [self.path]:
            try:
                _check_owner(path)
                urls = orjson.loads(path.read_bytes())
            # An engine's command deletes its file when the engine has ended.
            except FileNotFoundError:
                if path == self.path:
                    raise UserError(f"{KEY}: there is no {path}") from None
                continue
            except (OSError, ValueError) as error:
                raise UserError(f"{KEY}: {path} cannot be read: {error}") from error
            if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
                raise UserError(f"{KEY}: {path}: got {urls!r:.80}, expected a JSON list of URLs")
            for url in urls:
                if problem := url_problem(url, with_tls=self._config.cluster.tls is not None):
                    raise UserError(f"{KEY}: {path}: {problem}")
                name = external_name(url)
                if (other := found.setdefault(name, url.rstrip("/"))) != url.rstrip("/"):
                    raise UserError(f"{KEY}: {path}: {url} and {other} are both named {name}")
        return found

    def build_all(self) -> list[RolloutEngine]:
        """Make the engines of the list, not started. Raises ConfigError if it is empty."""
        if not (named := self.read()):
            raise ConfigError(f"{KEY}: {self.path} lists no engine")
        return [self.build(name, url) for name, url in named.items()]

    def build(self, name: str, url: str) -> RolloutEngine:
        """Make an engine of the list, not started."""
        engine: RolloutEngine = self._factory.build_external(self._config, name, url)
        return engine


async def keep_shown(members: Sequence[Member], path: Path) -> None:
    """Write the state of the engines to a file, for `rlcore status`, until cancelled."""
    shown: list[dict[str, Any]] | None = None
    while True:
        rows = [member.describe() for member in members]
        if rows != shown:
            try:
                await asyncio.to_thread(write_atomic, path, orjson.dumps(rows))
                shown = rows
            # recovery: the next round writes again; the file is for display only
            except OSError as error:
                logger.warning("%s cannot be written: %s", path, error)
        await asyncio.sleep(SHOW_S)


def external_name(url: str) -> str:
    """Return the name of an engine, made of host, port and path."""
    parts = urlsplit(url.rstrip("/"))
    port = "" if parts.port is None else f"-{parts.port}"
    return re.sub(r"[^A-Za-z0-9._-]", "-", f"{parts.hostname}{port}{parts.path}").lstrip("-")


def _check_owner(path: Path) -> None:
    """Refuse a file or folder of another user, or one that everybody may write to.

    Raises:
        UserError: names it.
        FileNotFoundError: there is none.
    """
    found = path.stat()
    if found.st_mode & stat.S_IWOTH:
        raise UserError(
            f"{KEY}: everybody may write to {path}, and so send the engines' keys anywhere: chmod"
            f" o-w {path}, or take another path"
        )
    if found.st_uid not in (os.getuid(), 0):
        raise UserError(
            f"{KEY}: {path} is another user's (uid {found.st_uid}), who would get the engines'"
            " keys: take a path of your own"
        )
