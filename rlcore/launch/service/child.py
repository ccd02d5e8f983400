"""The process of the rollout service; rank 0 starts `python -m rlcore.launch.service.child FD`.

It answers calls from the inherited socket FD, and ends with rank 0.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from logging.handlers import MemoryHandler
from typing import Any

from rlcore.boundary.process_tree import die_with_parent
from rlcore.errors import RlcoreError, RunFailed
from rlcore.import_paths import place_of_error
from rlcore.launch.logs import EARLY_RECORDS, LineStream, Terminal
from rlcore.launch.process import set_up_torch
from rlcore.launch.service import frames
from rlcore.launch.service.frames import LINE, Begin
from rlcore.launch.service.host import ServiceHost
from rlcore.timeline.start import now, process_start
from rollout.asyncio_utils import DaemonExecutor

# Calls that may run simultaneously.
MAX_CALLS = 256
logger = logging.getLogger(__name__)


class Connection:
    """The socket to rank 0. One thread reads from it; any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()

    def send(self, call: int, answer: Any) -> None:
        """Send an answer; an answer that cannot be pickled becomes an error."""
        try:
            parts = frames.encode((call, answer))
        except Exception as error:  # noqa: BLE001 - whatever pickling raises
            unsent = RunFailed(f"its answer cannot be sent: {type(error).__name__}: {error}")
            parts = frames.encode((call, (False, unsent)))
        with self._sending:
            frames.send(self._socket, parts)

    def line(self, stream: str, text: str) -> None:
        """Send a line for rank 0 to print."""
        try:
            self.send(LINE, (stream, text))
        # Rank 0 is gone, and this process ends.
        except OSError:
            return

    def receive(self) -> Any:
        """Wait for a message. Raises the errors of `frames.receive`."""
        return frames.receive(self._socket)


def main() -> None:
    """Serve until rank 0 ends the service, or is gone."""
    die_with_parent()
    began = process_start()
    # Rank 0 handles these signals, and ends this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        # Engines and reward workers would inherit SIG_IGN, but not a handler.
        signal.signal(number, lambda _number, _frame: None)
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    connection = Connection(socket.socket(fileno=descriptor))
    sys.stdout = LineStream(lambda line: connection.line("out", line))
    sys.stderr = LineStream(lambda line: connection.line("err", line))
    early = MemoryHandler(EARLY_RECORDS, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    logging.getLogger().setLevel(logging.INFO)
    logging.getLogger().addHandler(early)
    logging.getLogger().addHandler(Terminal())
    logging.captureWarnings(True)
    _import_ahead()
    logger.info("imported %.1f s after this process began", now() - began)
    try:
        begin: Begin = connection.receive()
    except (EOFError, OSError):
        os._exit(0)
    os.chdir(begin.folder)
    sys.path[:] = begin.path
    # Reward models run in this process.
    set_up_torch(begin.config)
    asyncio.run(_serve(connection, ServiceHost(begin, early)))


def _import_ahead() -> None:
    """Import the service's modules while rank 0 joins the other ranks and reads its input."""
    import transformers  # noqa: F401

    import rollout.fleet.engine_memory
    import rollout.service  # noqa: F401


async def _serve(connection: Connection, host: ServiceHost) -> None:
    loop = asyncio.get_running_loop()
    loop.set_default_executor(DaemonExecutor(MAX_CALLS, "service"))
    calls: set[asyncio.Task[None]] = set()
    closed = asyncio.Event()

    async def answer(call: int, part: str, given: Sequence[Any]) -> None:
        asked = now()
        try:
            found = True, await getattr(host, part)(*given)
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller
            found = False, _sendable(error, part)
        if part in ("open", "start"):
            logger.info("%s took %.1f s", part, now() - asked)
        await asyncio.to_thread(connection.send, call, found)
        if part == "close":
            closed.set()

    def begin_call(message: tuple[int, str, Sequence[Any]]) -> None:
        task = asyncio.ensure_future(answer(*message))
        calls.add(task)
        task.add_done_callback(calls.discard)

    def read() -> None:
        try:
            while True:
                loop.call_soon_threadsafe(begin_call, connection.receive())
        except (EOFError, OSError) as error:
            logger.info("this process ends, as rank 0 is gone: %s", error)
            os._exit(1)

    threading.Thread(target=read, name="calls", daemon=True).start()
    await closed.wait()
    # A thread that a plugin has left behind must not keep the process alive.
    os._exit(0)


def _sendable(error: BaseException, part: str) -> BaseException:
    """Return the error to send to rank 0: unchanged if it is ours and can be pickled."""
    if isinstance(error, RlcoreError):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception as problem:  # noqa: BLE001 - of a plugin's class of errors
            logger.warning("%s cannot be sent: %s", type(error).__name__, problem)
        else:
            return error
    else:
        logger.error("%s failed", part, exc_info=error)
        location = place_of_error(error)
    return RunFailed(f"the rollout service: {part}: {type(error).__name__}: {error}{location}")


if __name__ == "__main__":
    main()
