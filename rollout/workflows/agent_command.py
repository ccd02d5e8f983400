"""Runs an agent program that is a command of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

import orjson

from rlcore.deadlines import REAP_S
from rollout.gateway.server import Endpoint

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SHOWN_BYTES = 2000  # of the end of the output, in errors
OUTCOME_BYTES = 1 << 16  # of the end of the output, in which the last line lies


class CommandFailed(Exception):
    """The command could not be started, or its exit code is not 0."""


async def run_command(command: Sequence[str], task: DataclassInstance, endpoint: Endpoint) -> Any:
    """Run a program, and return the JSON value that is the last line of its standard output.

    It is given OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and as JSON on its standard input
    {"row": ..., "messages": ..., "tools": ...}. At its end, or when this is cancelled, its whole
    process group is killed.

    Raises:
        CommandFailed: with the end of what it printed.
    """
    # files: a pipe that nobody empties would stop it, or its children hold it open
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(orjson.dumps(asdict(task), option=orjson.OPT_SERIALIZE_NUMPY, default=str))
        given.seek(0)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=given,
                stdout=out,
                stderr=err,
                env=_environment(os.environ, endpoint),
                start_new_session=True,  # a process group of its own
            )
        except OSError as error:
            raise CommandFailed(f"command {command[0]!r} cannot be started: {error}") from error
        try:
            code = await process.wait()
        finally:
            await _end(process)
        printed = _end_of(out, OUTCOME_BYTES)
        if code != 0:
            how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
            words = (_end_of(err, SHOWN_BYTES) or printed[-SHOWN_BYTES:]).strip()
            raise CommandFailed(f"command {command[0]!r}: {how}; the end of its output:\n{words}")
        return _outcome(command[0], printed)


def _outcome(name: str, printed: str) -> Any:
    lines = printed.strip().splitlines()
    try:
        return orjson.loads(lines[-1]) if lines else None
    except orjson.JSONDecodeError as error:
        raise CommandFailed(
            f"command {name!r}: the last line of its output must be its outcome as JSON (a number,"
            f" numbers by name, or null), got {lines[-1][:200]!r}"
        ) from error


def _environment(ours: Mapping[str, str], endpoint: Endpoint) -> dict[str, str]:
    """Return our variables, with the endpoint's, which no proxy stands before."""
    host = "127.0.0.1"
    direct = {
        name: ",".join(filter(None, [ours.get(name), host])) for name in ("NO_PROXY", "no_proxy")
    }
    return {
        **ours,
        **direct,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
    }


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of the process group."""
    with suppress(ProcessLookupError, PermissionError):  # none is left (macOS: only zombies)
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait({asyncio.ensure_future(process.wait())}, timeout=REAP_S)


def _end_of(file: IO[bytes], size: int) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    return file.read().decode(errors="replace")
