"""The server process of an engine: its start, port, log and end. Linux and macOS."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, Protocol

import orjson
import psutil

from rlcore.boundary.child_environment import ENGINES, allowed_environment
from rlcore.config.sections.rollout import EngineConfig
from rlcore.deadlines import REAP_S, TERMINATE_S
from rlcore.errors import DeadlineExceeded, RunFailed, UserError

# Shown characters of a log line: SGLang prints its whole configuration as one line.
LINE_LENGTH = 500
END_BYTES = 1 << 20  # bytes read from the end of a log
POLL_S = 0.02  # interval of checks for remaining processes
# Programs by which flashinfer, DeepGEMM and Triton build a kernel at its first use.
COMPILERS = frozenset({"ninja", "nvcc", "cicc", "ptxas", "cudafe++", "cc1plus", "gcc", "g++"})


class Server(Protocol):
    """A server process of an engine, started by us on this machine, by a launcher on another one,
    or by the user.
    """

    @property
    def name(self) -> str: ...

    @property
    def managed(self) -> bool:
        """Whether `start` and `kill` start and end the process; otherwise they only connect and
        disconnect.
        """

    @property
    def pid(self) -> int | None: ...

    @property
    def gpus(self) -> tuple[str, ...]:
        """Its GPUs by `name_gpus`, one for each tensor-parallel rank; () if unknown."""

    @property
    def ended(self) -> asyncio.Future[Any] | None:
        """Done once the process has ended; None before the first start, or if it is not watched."""

    async def start(self) -> str:
        """Start the server and return its URL. May be called again after `kill`."""

    async def compiles(self) -> bool:
        """Whether a compiler runs on its machine, so that it may be silent; False if unknown."""

    def describe_end(self) -> str:
        """How the process ended, and the last lines of its log."""

    async def stop(self) -> None:
        """Ask the process to end, then end it."""

    async def kill(self) -> None:
        """End the process at once."""


def compiles_here() -> bool:
    """Whether a compiler of this user runs on this machine.

    It may be another server's: the one that waits for a kernel's lock has none of its own.
    """
    own = os.getuid()
    return any(
        process.info["name"] in COMPILERS and process.info["uids"].real == own
        for process in psutil.process_iter(["name", "uids"])
        if process.info["uids"] is not None
    )


class ChildServer:
    """A `Server` whose process is our child, in its own process group.

    Its output and errors go to `log`. A subclass has `start`, which calls `launch`. The whole group
    ends with the process.
    """

    managed = True
    gpus: tuple[str, ...] = ()
    # Asks the process to end.
    stop_signal = signal.SIGTERM
    # Last lines of the log shown after a failure.
    log_lines = 15

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.process: asyncio.subprocess.Process | None = None
        # Done, with the exit code, once the process has ended.
        self.ended: asyncio.Task[int] | None = None
        # The other end of a running process's `ready_fd`, until `launch` waits for its report.
        self._reader: BufferedReader | None = None
        self._ready_fd = -1

    async def spawn(
        self, command: Sequence[str], environment: Mapping[str, str], output: Any
    ) -> None:
        """Run `command`, which imports and then waits for its input: see `launch`.

        Call this from a thread that lives as long as the process: Linux ends the process with the
        *thread* that made it.

        Args:
            output: where its output and errors go.

        Raises:
            RunFailed: the process cannot be run.
        """
        read_fd, write_fd = os.pipe()
        try:
            self.process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=(write_fd,),
                env=environment,
                # Keeps the terminal's Ctrl-C from the process; we stop it ourselves.
                start_new_session=True,
            )
        except BaseException as error:
            os.close(read_fd)
            if isinstance(error, OSError):
                raise RunFailed(f"engine {self.name} cannot be started: {error}") from error
            raise
        finally:
            os.close(write_fd)
        if self._reader is not None:
            self._reader.close()
        self._reader = os.fdopen(read_fd, "rb")
        self._ready_fd = write_fd
        self.ended = asyncio.ensure_future(_until_ended(self.process))

    async def launch(
        self,
        command: Sequence[str],
        config: Callable[[int], bytes],
        *,
        timeout_s: float,
        environment: Mapping[str, str],
    ) -> int:
        """Run `command` with `config(ready_fd)` on its input; return the port that it reports.

        The process reports {"port": ...} on `ready_fd`. If `spawn` has already started it, it gets
        its input. May be called again after the process has ended.

        Args:
            environment: the process's variables.

        Raises:
            UserError: the process reported {"error": ...}: its configuration is wrong.
            RunFailed: the process cannot be run, or ended before it was ready; then the message has
                the last lines of its log.
            DeadlineExceeded: the process was not ready within `timeout_s` and was killed.
        """
        try:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            if self._reader is None or self.ended is None or self.ended.done():
                with self.log.open("ab") as log:
                    await self.spawn(command, environment, log)
        except OSError as error:
            raise RunFailed(f"engine {self.name} cannot be started: {error}") from error
        reader = self._reader
        self._reader = None
        try:
            return await self._wait_ready(reader, config(self._ready_fd), timeout_s)
        except BaseException:
            await self.kill()
            raise

    async def _wait_ready(self, reader: object, config: bytes, timeout_s: float) -> int:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self.ended is not None
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), reader
        )
        try:
            self.process.stdin.write(config)
            self.process.stdin.close()
            # The line is b"" if the process ends.
            line = asyncio.ensure_future(stream.readline())
            done, _ = await asyncio.wait(
                {line, self.ended}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if line in done and line.result():
                report = orjson.loads(line.result())
                if "error" in report:
                    raise UserError(f"engine {self.name}: {report['error']}")
                return int(report["port"])
            line.cancel()
            if done:
                await asyncio.wait({self.ended}, timeout=TERMINATE_S)
                raise RunFailed(
                    f"engine {self.name} ended before it was ready: {self.describe_end()}"
                )
            raise DeadlineExceeded(
                f"engine {self.name} was not ready within {timeout_s:g} s"
                f" (rollout.engine.start_timeout_s); {self.last_words()}"
            )
        finally:
            transport.close()

    @property
    def pid(self) -> int | None:
        """The process id; None before the first start."""
        return None if self.process is None else self.process.pid

    async def compiles(self) -> bool:
        """See `Server.compiles`."""
        return await asyncio.to_thread(compiles_here)

    def describe_end(self) -> str:
        """See `Server.describe_end`."""
        code = self.process.returncode if self.process is not None else None
        if code is None:
            how = "it still runs"
        elif code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"exit code {code}"
        return f"{how}; {self.last_words()}"

    def last_words(self) -> str:
        """The last lines of its log."""
        lines = _end_of(self.log).splitlines()[-self.log_lines :] if self.log.exists() else []
        lines = [
            line if len(line) <= LINE_LENGTH else f"{line[:LINE_LENGTH]} ..." for line in lines
        ]
        if not lines:
            return f"its log {self.log} is empty"
        return f"the end of its log {self.log}:\n  " + "\n  ".join(lines)

    async def stop(self) -> None:
        """Ask the process to end, then kill its whole group."""
        if self.process is not None and self.ended is not None and not self.ended.done():
            self.process.send_signal(self.stop_signal)
            await asyncio.wait({self.ended}, timeout=TERMINATE_S)
        await self.kill()

    async def kill(self) -> None:
        """Kill the whole group, including stopped processes. Returns when none of them runs."""
        if self.process is None or self.ended is None:
            return
        if not self.ended.done():
            _kill_group(self.process.pid)
            await asyncio.wait({self.ended}, timeout=REAP_S)
        deadline = time.monotonic() + REAP_S
        while members(self.process.pid) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)


def _end_of(log: Path) -> str:
    """The last lines of a log. Reads only the end, since a log may be long."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END_BYTES))
        text = file.read().decode(errors="replace")
    return text if size <= END_BYTES else text.partition("\n")[2]


async def _until_ended(process: asyncio.subprocess.Process) -> int:
    code = await process.wait()
    # Kill the group before another process can get the same id.
    _kill_group(process.pid)
    return code


def _kill_group(group: int) -> None:
    # The group is empty, or on macOS has only zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def members(group: int) -> list[int]:
    """The running and stopped processes of a process group, without zombies."""
    found = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


RANK = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}
# Set by us, by torchrun or by the user for the trainer's kernels, allocator and collectives. They
# may break an engine: torch_memory_saver, for example, does not start with expandable segments.
TRAINERS_OWN = {
    "NCCL_ALGO",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
}
TRAINERS_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "NVTE_")
# On a CPU engines and trainer share the cores, and so the limits of threads.
THREADS = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}


def engine_environment(
    config: EngineConfig, *, on_gpu: bool, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """Make the variables of an engine's process, from a list and without the trainer's own.

    `rollout.engine.environment` overrides everything else.

    Args:
        gpus: the names of its GPUs; if empty, the process sees the same GPUs as we do.
    """
    dropped = RANK | TRAINERS_OWN | (THREADS if on_gpu else set())
    variables = {
        name: value
        for name, value in allowed_environment(more=ENGINES).items()
        if name not in dropped and not name.startswith(TRAINERS_PREFIXES)
    }
    if gpus:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables | config.environment


def with_this_checkout(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with this checkout importable."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [variables.get("PYTHONPATH")])])
    return {**variables, "PYTHONPATH": path}
