"""What every actor of a run does first: go where the driver is, log into the run's folder, speak on
the driver's terminal.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.errors import RunFailed

if TYPE_CHECKING:
    from torch.distributed import Store

CONNECT_S = 60.0
# for the text of a line that is counted: its speaker may have been killed in between
HALF_SAID_S = 2.0
_COUNT = "lines"


@dataclass(frozen=True)
class ActorEnv:
    """Where the driver is."""

    folder: str  # its working directory: relative paths of the configuration begin there
    host: str  # of its store of lines, see `LogRelay`
    port: int

    def enter(self) -> None:
        """Raises RunFailed where this node has no such folder."""
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise RunFailed(
                f"{self.folder} cannot be entered on node {os.uname().nodename} ({error}): a run's"
                " nodes share the folder that it is started in, under one path"
            ) from error

    def speak(self) -> None:
        """What this process prints from now on appears on the driver's terminal."""
        import torch.distributed as dist

        lines = dist.TCPStore(
            self.host, self.port, None, False, timedelta(seconds=CONNECT_S), wait_for_workers=False
        )
        sys.stdout = RemoteStdout(lines, "out")
        sys.stderr = RemoteStdout(lines, "err")


class RemoteStdout(io.TextIOBase):
    """A stream whose text another process prints, line by line."""

    encoding = "utf-8"

    def __init__(self, store: Store, stream: str) -> None:
        self._store = store
        self._stream = stream
        self._line = ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._say(line + "\n")
        return len(text)

    def flush(self) -> None:
        """A line that is not whole yet is kept back: several processes speak."""

    def _say(self, line: str) -> None:
        from torch.distributed import DistError

        try:
            self._store.set(line_key(self._store.add(_COUNT, 1)), f"{self._stream} {line}")
        except DistError:  # recovery: the driver is gone, and with it the terminal
            logging.getLogger(__name__).info("not said: %s", line.rstrip())


def line_key(number: int) -> str:
    return f"line/{number}"


class LogRelay:
    """The driver's end: prints what the actors say."""

    def __init__(self, host: str) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore(
            host, 0, None, True, timedelta(seconds=CONNECT_S), wait_for_workers=False
        )
        self.port = self._store.port
        self._next = 1
        self._missed_at: float | None = None  # when the next line was counted, and not there

    def show(self, *, patience_s: float = HALF_SAID_S) -> None:
        """Everything that was said since the last time; a line that stays half said for
        `patience_s` is passed over.
        """
        while self._next <= self._store.add(_COUNT, 0):
            key = line_key(self._next)
            if self._store.check([key]):
                stream, _, text = self._store.get(key).decode(errors="replace").partition(" ")
                self._store.delete_key(key)
                print(text, end="", file=sys.stdout if stream == "out" else sys.stderr, flush=True)
            elif not self._is_lost(patience_s):
                return
            self._next = self._next + 1
            self._missed_at = None

    def _is_lost(self, patience_s: float) -> bool:
        now = time.monotonic()
        self._missed_at = self._missed_at or now
        return now >= self._missed_at + patience_s


def log_to(path: Path) -> None:
    """All records and everything that is printed below Python go to `path` from now on; SIGUSR1
    writes all stacks there.
    """
    from rlcore.launch.logs import FORMAT, Terminal

    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", buffering=1)
    handler = logging.StreamHandler(file)
    handler.setFormatter(logging.Formatter(FORMAT))
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    logging.getLogger().addHandler(Terminal())
    logging.captureWarnings(True)
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
