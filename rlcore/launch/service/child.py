"""The process of the rollout service; rank 0 starts `python -m rlcore.launch.service.child FD`.

It answers calls from the inherited socket FD, and ends with rank 0.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlcore.boundary.process_tree import die_with_parent
from rlcore.config.secrets import hide_secrets
from rlcore.data.batch import StepRollouts
from rlcore.errors import ConfigError, RlcoreError, RunFailed
from rlcore.import_paths import error_location
from rlcore.launch.engines import build_service
from rlcore.launch.logs import LineStream, ProcessLog, log_folder
from rlcore.launch.process import set_up_torch
from rlcore.launch.run_folder import record_timeline
from rlcore.launch.service import frames
from rlcore.launch.service.frames import Begin
from rlcore.timeline.recorder import RECORDER
from rlcore.timeline.start import now, process_start
from rollout.asyncio_utils import DaemonExecutor

if TYPE_CHECKING:
    from rollout.fleet.engine_memory import FleetMemory
    from rollout.service import RolloutService

# Calls that may run simultaneously.
MAX_CALLS = 256
# This descriptor leads to the log of the service; `sys.stderr` leads to rank 0.
STDERR = 2
# The transport of an engine inside the trainer's process.
IN_PROCESS = "copy"
logger = logging.getLogger(__name__)


class Connection:
    """The socket to rank 0. One thread reads from it; any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._sending = threading.Lock()

    def send(self, call: int, answer: Any) -> None:
        """Send an answer; an answer that cannot be pickled becomes an error."""
        try:
            parts = frames.encode((call, answer))
        except Exception as error:  # noqa: BLE001 - whatever pickling raises
            unsent = RunFailed(f"its answer cannot be sent: {type(error).__name__}: {error}")
            parts = frames.encode((call, (False, unsent)))
        with self._sending:
            frames.send(self.socket, parts)

    def print(self, stream: str, text: str) -> None:
        """Send a line for rank 0 to print."""
        try:
            self.send(frames.LINE, (stream, text))
        # Rank 0 is gone, and this process ends.
        except OSError:
            return


class ServiceHost:
    """Holds the `RolloutService`. A call that waits for rollouts blocks no other call."""

    def __init__(self, begin: Begin, log: ProcessLog) -> None:
        hide_secrets(begin.config.model_dump())
        self._begin = begin
        self._config = begin.config
        self._log = log
        self._service: RolloutService | None = None
        self._memory: FleetMemory | None = None

    async def beat(self) -> None:
        """Answer at once. A hanging process cannot, and writes its stacks at half the limit."""
        limit_s = self._config.cluster.heartbeat_timeout_s
        faulthandler.dump_traceback_later(limit_s / 2, file=STDERR)

    async def open(self) -> NDArray[np.int64]:
        """Read and check the input of the service; return the lengths of its prompts."""

        self._service, self._memory = await asyncio.to_thread(
            build_service, self._config, greedy_baseline=self._begin.greedy_baseline
        )
        engines = self.service.fleet.engines
        if any(engine.transports == (IN_PROCESS,) for engine in engines):
            raise ConfigError(
                f"rollout.engine.kind: {self._config.rollout.engine.kind} takes weights only inside"
                " its own process, but with rollout.service: process the trainer is in another: set"
                " rollout.service to in_process"
            )
        return self.service.prompts.lengths

    async def start(self) -> None:
        """Start engines and reward workers, and write to the folder of the run from now on."""
        self._log.open(log_folder(self._config.run))
        record_timeline(self._config, "service")
        await asyncio.to_thread(self.service.start, again=self._begin.again)

    async def source(self, method: str, *arguments: Any) -> Any:
        """Call a method of `RolloutSource`."""
        found = await asyncio.to_thread(_method(self.service, method), *arguments)
        if method == "restore":
            RECORDER.begin(self.service.ledger.last_step)
        # No rollouts follow the last step.
        if method == "published":
            RECORDER.flush(arguments[0])
        return found

    async def next_step(self, step: int) -> tuple[StepRollouts, dict[str, Any]] | None:
        """Return the rollouts of a step, and the state from which a replacement continues."""
        found = await self.source("next_step", step)
        if found is None:
            return None
        RECORDER.flush(step)
        return found, await self.source("snapshot")

    async def memory(self, method: str, *arguments: Any) -> Any:
        """Call a method of `EngineMemory`."""
        return await asyncio.to_thread(_method(self._memory, method), *arguments)

    async def publication(self, method: str, *arguments: Any) -> Any:
        """Call a method of `WeightPublication`, on the service's own loop."""
        work = _method(self.service.publication, method)(*arguments)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.service.loop))

    async def close(self) -> None:
        """End the service, its engines and the timeline."""
        if self._service is not None:
            await asyncio.to_thread(self._service.close)
        RECORDER.close()

    @property
    def service(self) -> RolloutService:
        """The service, once it is open."""
        assert self._service is not None, "open comes first"
        return self._service


def _method(of: Any, name: str) -> Callable[..., Any]:
    method = getattr(of, name, None)
    if not callable(method):
        raise RunFailed(f"the rollout service knows no call {name!r}")
    return method  # type: ignore[no-any-return]


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
    sys.stdout = LineStream(lambda line: connection.print("out", line))
    sys.stderr = LineStream(lambda line: connection.print("err", line))
    log = ProcessLog("service", on_terminal=True, takes_output=True)
    # Import the service's modules while rank 0 joins the other ranks and reads its input.
    import transformers  # noqa: F401

    import rollout.fleet.engine_memory
    import rollout.service  # noqa: F401

    logger.info("imported %.1f s after this process began", now() - began)
    try:
        begin: Begin = frames.receive(connection.socket)
    except (EOFError, OSError):
        os._exit(0)
    os.chdir(begin.folder)
    sys.path[:] = begin.path
    # A workflow may use torch in this process.
    set_up_torch(begin.config)
    asyncio.run(_serve(connection, ServiceHost(begin, log)))


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
                loop.call_soon_threadsafe(begin_call, frames.receive(connection.socket))
        except (EOFError, OSError) as error:
            logger.info("this process ends, as rank 0 is gone: %s", error)
            os._exit(1)

    threading.Thread(target=read, name="calls", daemon=True).start()
    await closed.wait()
    # A thread that a plugin has left behind must not keep the process alive.
    os._exit(0)


def _sendable(error: BaseException, part: str) -> BaseException:
    """Return the error to send to rank 0: unchanged if it is ours and can be pickled."""
    location = ""
    if isinstance(error, RlcoreError):
        try:
            pickle.loads(pickle.dumps(error))
            return error
        except Exception as problem:  # noqa: BLE001 - of a plugin's class of errors
            logger.warning("%s cannot be sent: %s", type(error).__name__, problem)
    else:
        logger.error("%s failed", part, exc_info=error)
        location = error_location(error)
    return RunFailed(f"the rollout service: {part}: {type(error).__name__}: {error}{location}")


if __name__ == "__main__":
    main()
