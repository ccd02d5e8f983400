"""Runs programs on this machine, confined and limited, and ends each with its descendants.

`build_sandbox` chooses between this and a SandboxFusion server.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from rlcore.boundary.process_tree import descendants, memory
from rlcore.config.sections.sandbox import SandboxConfig
from rlcore.deadlines import REAP_S, SANDBOX_START_S
from rlcore.errors import ConfigError
from rollout.asyncio_utils import kill_process
from rollout.sandbox import Outcome, Program, Sandbox, Status
from rollout.sandbox.confinement import Confinement, candidates, interpreter
from rollout.sandbox.fusion import FusionSandbox

logger = logging.getLogger(__name__)

READY = b"ready"  # report of `inside.py`
POLL_S = 0.1  # interval of checks of a program's memory and processes
CHUNK = 1 << 16
# by language: the program's file and its interpreter; Python's comes from the configuration
COMMANDS = {"python": ("main.py",), "bash": ("main.sh", "/bin/bash")}
ADVICE = (
    "install bubblewrap (apt-get install bubblewrap) and allow namespaces (docker run"
    " --security-opt seccomp=unconfined --cap-add SYS_ADMIN, or a user other than root where"
    " kernel.unprivileged_userns_clone is 1), or start a SandboxFusion server elsewhere and set"
    " reward.sandbox.kind: fusion and reward.sandbox.url; rlimits is UNSAFE and works anywhere"
)


def build_sandbox(config: SandboxConfig) -> Sandbox:
    """Return the sandbox; nothing is started yet."""
    limits = {"concurrency": config.concurrency, "output_bytes": config.output_kb << 10}
    if config.kind == "fusion":
        return FusionSandbox(str(config.url), retries=config.retries, **limits)
    if config.kind == "rlimits":
        logger.warning(
            "reward.sandbox.kind is rlimits: code that a model wrote can read your files, talk to"
            " your processes and use the network"
        )
    settings = {
        "python": interpreter(config.python),
        "folders": tuple(config.folders),
        "processes": config.processes,
        "files_mb": config.files_mb,
    }
    return LocalSandbox(candidates(config.kind, settings), **limits)


class LocalSandbox:
    """A `Sandbox` of programs on this machine."""

    def __init__(
        self, candidates: list[Confinement], *, concurrency: int, output_bytes: int
    ) -> None:
        self._candidates = candidates
        self._output_bytes = output_bytes
        self._confinement: Confinement | None = None
        self._starting: asyncio.Task[None] | None = None
        # free slots; concurrent programs run as different users if we are root
        self._slots: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(concurrency):
            self._slots.put_nowait(slot)

    async def start(self) -> None:
        """See `Sandbox`: choose the first confinement that can run a program."""
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._choose())
        await asyncio.shield(self._starting)

    async def _choose(self) -> None:
        problems: list[str] = []
        for confinement in self._candidates:
            outcome = await _Run(confinement, 0, self._output_bytes).run(
                Program("print(6 * 7)", timeout_s=SANDBOX_START_S)
            )
            if outcome.succeeded and outcome.stdout == "42\n":
                self._confinement = confinement
                logger.info("model-written code is confined by %s", confinement.name)
                return
            said = f"{outcome.reason} {outcome.stderr}".split("\n")
            problems.append(f"{confinement.name}: {' '.join(' '.join(said).split())[:300]}")
        raise ConfigError(
            f"reward.sandbox: no program can be confined here ({'; '.join(problems) or 'nothing'}"
            f" is installed for it); {ADVICE}"
        )

    async def run(self, program: Program) -> Outcome:
        if program.language not in COMMANDS:
            raise ConfigError(
                f"reward.sandbox: no {program.language} on this machine, only"
                f" {' and '.join(COMMANDS)}; SandboxFusion has more (reward.sandbox.kind: fusion)"
            )
        await self.start()
        assert self._confinement is not None
        slot = await self._slots.get()
        try:
            return await _Run(self._confinement, slot, self._output_bytes).run(program)
        finally:
            self._slots.put_nowait(slot)

    async def close(self) -> None:
        """See `Sandbox`. Programs end with the tasks that run them."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})


@dataclass
class _Run:
    """One run of one program."""

    confinement: Confinement
    slot: int
    output_bytes: int
    written: int = 0
    too_much: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, program: Program) -> Outcome:
        with ExitStack() as stack:
            task = self._task(program)
            if not self.confinement.own_process_table:
                made = tempfile.TemporaryDirectory(
                    prefix="rlcore-sandbox-", ignore_cleanup_errors=True
                )
                folder = stack.enter_context(made)
                task["folder"] = folder
                task["environment"] |= {"HOME": folder, "TMPDIR": folder}
            return await self._process(json.dumps(task).encode(), program)

    def _task(self, program: Program) -> dict[str, Any]:
        """The facts about the program and its surroundings that `inside.py` needs."""
        task = self.confinement.task(self.slot)
        main, *argv = COMMANDS[program.language]
        code = program.code.encode("utf-8", "replace")
        limits = {
            "CPU": int(program.timeout_s) + 2,
            "DATA": program.memory_mb << 20,
            "FSIZE": self.confinement.files_mb << 20,
            "NOFILE": 256,
            "CORE": 0,
        }
        if (processes := task.pop("processes")) is not None:
            limits["NPROC"] = processes
        return task | {
            "argv": [*(argv or (self.confinement.python.path, "-s")), main],
            "files": {
                name: base64.b64encode(data).decode()
                for name, data in {**program.files, main: code}.items()
            },
            "stdin": base64.b64encode(program.stdin.encode("utf-8", "replace")).decode(),
            "limits": limits,
            "alarm": int(program.timeout_s + SANDBOX_START_S) + 1,
        }

    async def _process(self, task: bytes, program: Program) -> Outcome:
        read, write = os.pipe()
        with os.fdopen(read, "rb", buffering=0) as status:
            # shielded, since an interrupted process start of asyncio leaves half a process
            starting = asyncio.ensure_future(self._start(write))
            try:
                process = await asyncio.shield(starting)
            except OSError as error:
                return Outcome("error", reason=f"cannot start: {error}")
            except asyncio.CancelledError:
                with suppress(OSError):
                    await _end(await starting, [])
                raise
            assert process.stdout is not None
            assert process.stderr is not None
            output = [
                asyncio.ensure_future(self._read(stream))
                for stream in (process.stdout, process.stderr)
            ]
            begin = time.monotonic()
            try:
                reason = await self._until_ready(process, status, task)
                begin = time.monotonic()
                ended: tuple[Status, str] = ("error", reason)
                if not reason:
                    ended = await self._until_end(process, program, begin)
            finally:
                # also if this task is cancelled
                await asyncio.shield(_end(process, output))
            seconds = time.monotonic() - begin
            if ended[0] == "finished" and (late := status.read(4096)):
                # the program itself could not be executed
                return Outcome("error", reason=late.decode("utf-8", "replace"))
            stdout, stderr = (
                "" if part.cancelled() else part.result().decode("utf-8", "replace")
                for part in output
            )
            code = process.returncode if ended[0] == "finished" else None
            if code is not None and code < 0:
                code = 128 - code
            return Outcome(ended[0], stdout, stderr, code, seconds, ended[1])

    async def _start(self, status: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                *self.confinement.command(status),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={"PATH": os.environ.get("PATH", "/usr/bin:/bin"), "LANG": "C.UTF-8"},
                pass_fds=(status,),
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(status)

    async def _until_ready(
        self, process: asyncio.subprocess.Process, status: BinaryIO, task: bytes
    ) -> str:
        """Wait until the program begins; return the error if it cannot."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[bytes] = loop.create_future()

        def said() -> None:
            if not ready.done():
                ready.set_result(status.read(4096))

        loop.add_reader(status, said)
        try:
            feeding = asyncio.ensure_future(_feed(process, task))
            await asyncio.wait({ready}, timeout=SANDBOX_START_S)
            feeding.cancel()
        finally:
            loop.remove_reader(status)
        if not ready.done():
            return f"the sandbox has not started in {SANDBOX_START_S:g} s"
        if ready.result() == READY:
            return ""
        error = ready.result().removeprefix(READY).decode("utf-8", "replace")
        return f"the sandbox cannot start: {error}".rstrip(": ")

    async def _until_end(
        self, process: asyncio.subprocess.Process, program: Program, begin: float
    ) -> tuple[Status, str]:
        """Wait for the program's end, or for a reason to end it."""
        gone = asyncio.ensure_future(process.wait())
        full = asyncio.ensure_future(self.too_much.wait())
        end = begin + program.timeout_s
        try:
            while True:
                await asyncio.wait(
                    {gone, full},
                    timeout=min(POLL_S, max(end - time.monotonic(), 0)),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if full.done():
                    return "limit", f"wrote more than {self.output_bytes >> 10} KiB"
                if gone.done():
                    return "finished", ""
                if time.monotonic() >= end:
                    return "timeout", f"had not ended after {program.timeout_s:g} s"
                below = descendants(process.pid)
                if len(below) > self.confinement.processes + 4:
                    return "limit", f"had more than {self.confinement.processes} processes"
                if memory(below) > program.memory_mb << 20:
                    return "limit", f"used more than {program.memory_mb} MiB of memory"
        finally:
            gone.cancel()
            full.cancel()

    async def _read(self, stream: asyncio.StreamReader) -> bytes:
        kept = bytearray()
        while chunk := await stream.read(CHUNK):
            kept += chunk[: max(0, self.output_bytes - self.written)]
            self.written += len(chunk)
            if self.written > self.output_bytes:
                self.too_much.set()
        return bytes(kept)


async def _end(
    process: asyncio.subprocess.Process, output: Sequence[asyncio.Future[bytes]]
) -> None:
    """Kill all remaining processes, and read what they have written."""
    await kill_process(process, "sandboxed process")
    if output:
        await asyncio.wait(output, timeout=REAP_S)
    for part in output:
        # another process still holds the other end
        if not part.done():
            part.cancel()
            with suppress(asyncio.CancelledError):
                await part


async def _feed(process: asyncio.subprocess.Process, task: bytes) -> None:
    assert process.stdin is not None
    # the process has died, and its exit status says why
    with suppress(ConnectionError):
        process.stdin.write(task)
        await process.stdin.drain()
    process.stdin.close()
