"""Where one rank's records go: its file in the run's folder, and from rank 0 our own warnings to
the terminal too.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TextIO

from rlcore.config.sections.run import RunConfig
from rlcore.errors import RlcoreError
from rlcore.trainer.rank_sync import Failure

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
OURS = ("rlcore", "backends", "rollout")
EARLY_RECORDS = 10_000
LAST_LINES = 15
LAST_LINES_OF_A_STACK = 40
# their INFO lists every parameter, and would be all that a log's end shows
CHATTY = ("megatron",)
# faulthandler writes to the descriptor, also while the interpreter ends
_kept_open: list[TextIO] = []


class RankLog:
    """Keeps records until `open` says which file they belong in: a run's folder is taken only when
    all else is well.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._early = MemoryHandler(
            EARLY_RECORDS, flushLevel=logging.CRITICAL + 1, flushOnClose=False
        )
        self._file: logging.Handler | None = None
        self._stream: TextIO | None = None

    def open(self, folder: Path) -> None:
        """Write to `folder`/rank_N.log from here on, and what was said before.

        The whole output of the ranks above 0 goes there. `kill -USR1 PID` writes the stack of every
        thread into it.
        """
        folder.mkdir(parents=True, exist_ok=True)
        file = path_of(folder, self.rank).open("a", buffering=1)
        _kept_open.append(file)
        self._stream = file
        self._file = logging.StreamHandler(file)
        self._file.setFormatter(logging.Formatter(FORMAT))
        self._early.setTarget(self._file)
        self._early.flush()
        logging.getLogger().removeHandler(self._early)
        logging.getLogger().addHandler(self._file)
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        if self.rank != 0:
            sys.stdout.flush()
            sys.stderr.flush()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)

    def last_words(self, error: BaseException) -> None:
        """End the file with what ended this rank. Python itself writes the traceback of the others'
        there.
        """
        if isinstance(error, RlcoreError):
            self._write(str(error))
        elif self.rank == 0:
            self._write("this rank ends:", error)

    def dump_stacks(self, failure: Failure) -> None:
        """What every thread is at: for a rank that is about to be ended because it does not leave."""
        self._write(f"{failure}; this rank does not leave by itself and is ended, where it stands:")
        if self._stream is not None:
            faulthandler.dump_traceback(self._stream)

    def _write(self, text: str, error: BaseException | None = None) -> None:
        """Into the file alone: somebody else tells the terminal."""
        trace = None if error is None else (type(error), error, error.__traceback__)
        if self._file is not None:
            self._file.handle(
                logging.LogRecord("rlcore", logging.ERROR, __file__, 0, text, None, trace)
            )

    def close(self) -> None:
        for handler in (self._early, self._file):
            if handler is not None:
                logging.getLogger().removeHandler(handler)


class Terminal(logging.Handler):
    """Warnings of ours, on the standard error of the moment: a progress display may have put itself
    before it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING and record.name.partition(".")[0] in OURS

    def emit(self, record: logging.LogRecord) -> None:
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr, flush=True)


@contextmanager
def rank_log(rank: int) -> Iterator[RankLog]:
    """Collect this process's records, Python's warnings among them, while open."""
    root = logging.getLogger()
    log = RankLog(rank)
    handlers: list[logging.Handler] = [log._early] + ([Terminal()] if rank == 0 else [])
    levels = {name: logging.getLogger(name).level for name in (None, *CHATTY)}
    root.setLevel(logging.INFO)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)  # Megatron warns of every package that it can do without
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield log
    except BaseException as error:
        log.last_words(error)
        raise
    finally:
        log.close()
        for handler in handlers:
            root.removeHandler(handler)
        for logger_name, level in levels.items():
            logging.getLogger(logger_name).setLevel(level)


def path_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def folder_of(run: RunConfig) -> Path:
    return Path(run.dir) / run.name / "logs"


def describe(failure: Failure, run: RunConfig, *, lines: int = LAST_LINES) -> str:
    """What ended a run, for the user: the rank, what happened, and the end of its log."""
    path = path_of(folder_of(run), failure.rank)
    tail = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
    if not tail:
        return f"trainer {failure}; its log {path} is empty"
    return f"trainer {failure}; the last lines of {path}:" + "".join(f"\n  {line}" for line in tail)
