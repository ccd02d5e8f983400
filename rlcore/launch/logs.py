"""The log of one rank: a file in the run's folder; rank 0's warnings go to the terminal too."""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TextIO

from rlcore.config.secrets import mask_text
from rlcore.config.sections.training import RunConfig
from rlcore.errors import RlcoreError
from rlcore.runs.checkpoints import committed_steps
from rlcore.terminal import printable
from rlcore.trainer.rank_sync import Failure

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
OURS = ("rlcore", "backends", "rollout")
EARLY_RECORDS = 10_000
LAST_LINES = 15
LAST_LINES_OF_A_STACK = 40
# These packages list every parameter at INFO, which would fill the last lines of a log.
CHATTY = ("megatron",)
# faulthandler writes to these files even while the interpreter ends.
_kept_open: list[TextIO] = []


class ProcessLog:
    """Collects records and Python's warnings, in memory until `open` names the log's folder.

    A run takes its folder after all checks.

    Args:
        name: the name of the file, without its suffix.
        on_terminal: our warnings are shown on the terminal, too.
        takes_output: all other output of the process goes to the file, too.
    """

    def __init__(self, name: str, *, on_terminal: bool, takes_output: bool) -> None:
        self._name = name
        self._takes_output = takes_output
        self._early = MemoryHandler(
            EARLY_RECORDS, flushLevel=logging.CRITICAL + 1, flushOnClose=False
        )
        self._handlers: list[logging.Handler] = [self._early]
        if on_terminal:
            self._handlers.append(Terminal())
        self._file: logging.StreamHandler[TextIO] | None = None
        root = logging.getLogger()
        root.setLevel(logging.INFO)
        # Megatron warns about every optional package that is missing.
        logging.captureWarnings(True)
        for handler in self._handlers:
            root.addHandler(handler)

    def open(self, folder: Path) -> None:
        """Write to a file in `folder` from now on, beginning with the buffered records."""
        self._file = open_log(folder / f"{self._name}.log")
        self._early.setTarget(self._file)
        self._early.flush()
        root = logging.getLogger()
        root.removeHandler(self._early)
        root.addHandler(self._file)
        self._handlers.append(self._file)
        if self._takes_output:
            sys.stdout.flush()
            sys.stderr.flush()
            # Redirect the descriptors, so that native code writes to the log, too.
            for descriptor in (1, 2):
                os.dup2(self._file.stream.fileno(), descriptor)

    def close(self, error: BaseException | None = None) -> None:
        """Stop collecting records, and end the file with the error that ended this process."""
        if isinstance(error, RlcoreError):
            self._write(str(error))
        elif error is not None and not self._takes_output:
            # Otherwise Python itself writes the traceback there.
            self._write("this rank ends:", error)
        for handler in self._handlers:
            logging.getLogger().removeHandler(handler)

    def dump_stacks(self, failure: Failure) -> None:
        """Write every thread's stack, before a rank that does not leave is ended."""
        self._write(f"{failure}; this rank does not leave by itself and is ended here:")
        if self._file is not None:
            faulthandler.dump_traceback(self._file.stream)

    def _write(self, text: str, error: BaseException | None = None) -> None:
        """Write only to the file, since another process reports to the terminal."""
        trace = None if error is None else (type(error), error, error.__traceback__)
        if self._file is not None:
            self._file.handle(
                logging.LogRecord("rlcore", logging.ERROR, __file__, 0, text, None, trace)
            )


@contextmanager
def rank_log(rank: int) -> Iterator[ProcessLog]:
    """Collect a rank's records while open."""
    levels = {name: logging.getLogger(name).level for name in (None, *CHATTY)}
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)
    log = ProcessLog(f"rank_{rank}", on_terminal=rank == 0, takes_output=rank > 0)
    try:
        yield log
    except BaseException as error:
        log.close(error)
        raise
    finally:
        log.close()
        for logger_name, level in levels.items():
            logging.getLogger(logger_name).setLevel(level)


def open_log(path: Path) -> logging.StreamHandler[TextIO]:
    """Open a process's log. `kill -USR1 PID` writes the stack of every thread into it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", buffering=1)
    _kept_open.append(file)
    handler: logging.StreamHandler[TextIO] = logging.StreamHandler(file)
    handler.setFormatter(MaskingFormatter(FORMAT))
    faulthandler.enable(file)
    faulthandler.register(signal.SIGUSR1, file)
    return handler


class LineStream(io.TextIOBase):
    """A text stream that passes every complete line to `send`, for another process to print."""

    encoding = "utf-8"

    def __init__(self, send: Callable[[str], None]) -> None:
        self._send = send
        self._line = ""

    def writable(self) -> bool:
        """True, as for every output stream."""
        return True

    def write(self, text: str) -> int:
        """Send the complete lines, and keep the rest."""
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._send(line + "\n")
        return len(text)

    def flush(self) -> None:
        """Do nothing: an incomplete line would mix with those of other processes."""


class MaskingFormatter(logging.Formatter):
    """Formats a record without the passwords of its URLs."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return mask_text(super().format(record))


class Terminal(logging.Handler):
    """Prints our warnings on the current `sys.stderr`, which a progress display may replace."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Select warnings of our own packages."""
        return record.levelno >= logging.WARNING and record.name.partition(".")[0] in OURS

    def emit(self, record: logging.LogRecord) -> None:
        """Print the level and the message; a lost terminal does not end the run."""
        message = printable(mask_text(record.getMessage()))
        with suppress(OSError):
            print(f"{record.levelname.lower()}: {message}", file=sys.stderr, flush=True)


def log_folder(run: RunConfig) -> Path:
    """Return the folder of a run's logs."""
    return Path(run.dir) / run.name / "logs"


def rank_log_path(run: RunConfig, rank: int) -> Path:
    """Return the path of a rank's log."""
    return log_folder(run) / f"rank_{rank}.log"


def describe_failure(failure: Failure, run: RunConfig, *, lines: int = LAST_LINES) -> str:
    """Describe why a run ended and how to continue it, with the last lines of the rank's log."""
    path = rank_log_path(run, failure.rank)
    # The ranks of an evaluation print instead, and a new rank has not opened its log.
    if not path.exists():
        return f"trainer {failure}"
    head = f"trainer {failure}"
    if not failure.bad_input:
        steps = committed_steps(Path(run.dir) / run.name / "checkpoints")
        head += (
            f"; continue after step {max(steps)} with --resume"
            if steps
            else "; it has no checkpoint yet: start it again with --overwrite"
        )
    tail = path.read_text(errors="replace").splitlines()[-lines:]
    if not tail:
        return f"{head}; its log {path} is empty"
    return f"{head}; the last lines of {path}:" + "".join(f"\n  {line}" for line in tail)
