"""Sets up an actor: its working directory, its log, and its output on the driver's terminal."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from rlcore.deadlines import STORE_S
from rlcore.errors import RunFailed
from rlcore.launch.logs import LineStream
from rlcore.terminal import printable

if TYPE_CHECKING:
    from torch.distributed import Store

# For the text of a line that is counted: its process may have been killed in between.
HALF_SAID_S = 2.0
LONGEST_LINE = 1 << 16  # characters of a line that are shown
_COUNT = "lines"


@dataclass(frozen=True)
class ActorEnv:
    """The driver's working directory, and the address of its `LogRelay`."""

    folder: str  # relative paths of the configuration begin there
    host: str
    port: int

    def enter(self) -> None:
        """Change to the driver's folder. Raises RunFailed where this node has no such folder."""
        try:
            os.chdir(self.folder)
        except OSError as error:
            raise RunFailed(
                f"{self.folder} cannot be entered on node {os.uname().nodename} ({error}): a run's"
                " nodes share the folder that it is started in, under one path"
            ) from error

    def redirect_output(self) -> None:
        """Print on the driver's terminal from now on."""
        import torch.distributed as dist

        lines = dist.TCPStore(
            self.host, self.port, None, False, timedelta(seconds=STORE_S), wait_for_workers=False
        )
        sys.stdout = RemoteStdout(lines, "out")
        sys.stderr = RemoteStdout(lines, "err")


class RemoteStdout(LineStream):
    """A stream whose lines the driver prints."""

    def __init__(self, store: Store, stream: str) -> None:
        super().__init__(self._tell)
        self._store = store
        self._stream = stream

    def _tell(self, line: str) -> None:
        from torch.distributed import DistError

        try:
            self._store.set(line_key(self._store.add(_COUNT, 1)), f"{self._stream} {line}")
        except DistError:  # recovery: the driver is gone, and with it the terminal
            logging.getLogger(__name__).info("not said: %s", line.rstrip())


def line_key(number: int) -> str:
    """The key of a line in the relay's store."""
    return f"line/{number}"


class LogRelay:
    """Prints, in the driver, the lines that actors send through a store."""

    def __init__(self, host: str) -> None:
        from rlcore.stores import bound_store

        self._store = bound_store(host, STORE_S)
        self.port = self._store.port
        self._next = 1
        self._missed_at: float | None = None  # when the next line was counted but missing

    def show(self, *, wait_s: float = HALF_SAID_S) -> None:
        """Print the new lines; skip a line that is counted but still missing after `wait_s`."""
        while self._next <= self._store.add(_COUNT, 0):
            key = line_key(self._next)
            if self._store.check([key]):
                stream, _, text = self._store.get(key).decode(errors="replace").partition(" ")
                self._store.delete_key(key)
                text = printable(text[:LONGEST_LINE])
                print(text, end="", file=sys.stdout if stream == "out" else sys.stderr, flush=True)
            elif not self._is_lost(wait_s):
                return
            self._next += 1
            self._missed_at = None

    def _is_lost(self, wait_s: float) -> bool:
        now = time.monotonic()
        self._missed_at = self._missed_at or now
        return now >= self._missed_at + wait_s
