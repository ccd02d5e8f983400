"""A server process that we started: its port, its log, its death, its end. Linux and macOS."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import orjson

from rlcore.errors import DeadlineExceeded, RunFailed

LOG_LINES = 15              # shown when it fails
TERMINATE_S = 5.0           # from SIGTERM to SIGKILL
KILL_S = 10.0               # for the kernel to take it away


class Child:
    """One process, from its start to its end. Its standard output and error go to `log`."""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log
        self.process: asyncio.subprocess.Process | None = None
        self._exit: asyncio.Task[int] | None = None

    async def start(self, module: str, config: Callable[[int], bytes], *, timeout_s: float) -> int:
        """Start `python -m module`, give it `config(ready_fd)` on its input; the port that it reports.

        Call it from a thread that lives as long as the process shall: Linux ends the process with the *thread* that made it.

        Raises:
            RunFailed: it ended before it was ready; the message holds the last lines of its log.
            DeadlineExceeded: it was not ready within `timeout_s` and was killed.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        read_fd, write_fd = os.pipe()
        reader = os.fdopen(read_fd, "rb")
        try:
            with self.log.open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", module, stdin=asyncio.subprocess.PIPE, stdout=log, stderr=log,
                    pass_fds=(write_fd,), env=environment(), start_new_session=True,    # Ctrl-C is for us to pass on
                )
        except BaseException:
            reader.close()
            raise
        finally:
            os.close(write_fd)
        self._exit = asyncio.ensure_future(self.process.wait())
        try:
            return await self._wait_ready(reader, config(write_fd), timeout_s)
        except BaseException:
            await self.kill()
            raise

    async def _wait_ready(self, reader: object, config: bytes, timeout_s: float) -> int:
        assert self.process is not None
        assert self.process.stdin is not None
        assert self._exit is not None
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), reader)
        try:
            self.process.stdin.write(config)
            self.process.stdin.close()
            line = asyncio.ensure_future(stream.readline())     # b"" when the process ends
            done, _ = await asyncio.wait({line, self._exit}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if line in done and line.result():
                return int(orjson.loads(line.result())["port"])
            line.cancel()
            if done:
                await asyncio.wait({self._exit}, timeout=TERMINATE_S)
                raise RunFailed(f"{self.name} ended before it was ready: {self.describe_end()}")
            raise DeadlineExceeded(
                f"{self.name} was not ready within {timeout_s:g} s (rollout.engine.start_timeout_s); {self.last_words()}"
            )
        finally:
            transport.close()

    @property
    def ended(self) -> asyncio.Task[int] | None:
        """Done once the process has ended; its exit code."""
        return self._exit

    @property
    def alive(self) -> bool:
        return self._exit is not None and not self._exit.done()

    def describe_end(self) -> str:
        code = self.process.returncode if self.process is not None else None
        if code is None:
            how = "it still runs"
        elif code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        else:
            how = f"exit code {code}"
        return f"{how}; {self.last_words()}"

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_LINES:] if self.log.exists() else []
        if not lines:
            return f"its log {self.log} is empty"
        return f"the end of its log {self.log}:\n  " + "\n  ".join(lines)

    async def terminate(self) -> None:
        """SIGTERM, then SIGKILL."""
        if self.process is not None and self._exit is not None and self.alive:
            self.process.terminate()
            await asyncio.wait({self._exit}, timeout=TERMINATE_S)
        await self.kill()

    async def kill(self) -> None:
        if self.process is not None and self._exit is not None and self.alive:
            self.process.kill()
            await asyncio.wait({self._exit}, timeout=KILL_S)


def environment() -> dict[str, str]:
    """Ours, with this checkout importable, and without the trainer's rank, which is none of an engine's business."""
    rank = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    root = str(Path(__file__).resolve().parents[2])
    kept = {name: value for name, value in os.environ.items() if name not in rank and not name.startswith("TORCHELASTIC_")}
    kept["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept
