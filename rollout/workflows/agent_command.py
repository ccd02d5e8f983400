"""Runs an agent program that is a command of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

import orjson

from rlcore.boundary import process_tree
from rlcore.deadlines import END_COMMAND_S, REAP_S
from rlcore.errors import RolloutFailed
from rollout.gateway.server import Endpoint

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SHOWN_BYTES = 2000  # of the end of the output, in errors
OUTCOME_BYTES = 1 << 16  # of the end of the output, in which the last line lies


async def run_command(
    command: Sequence[str],
    task: DataclassInstance,
    endpoint: Endpoint,
    environment: Mapping[str, str],
) -> Any:
    """Run a program, and return the JSON value that is the last line of its standard output.

    It is given OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and as JSON on its standard input
    {"row": ..., "messages": ..., "tools": ...}. At its end, or when this is cancelled, all that it
    started is killed (on Linux; elsewhere its process group).

    Args:
        environment: its other variables.

    Raises:
        RolloutFailed: it cannot be started, its exit code is not 0 (with the end of what it
            printed), or its last line is no JSON.
    """
    # files: a pipe that nobody empties would stop it, or its children hold it open
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(orjson.dumps(asdict(task), option=orjson.OPT_SERIALIZE_NUMPY, default=str))
        given.seek(0)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", process_tree.__file__),
            *command,
            stdin=given,
            stdout=out,
            stderr=err,
            env=_with_endpoint(environment, endpoint),
            start_new_session=True,  # a process group of its own
        )
        try:
            code = await process.wait()
        finally:
            await _end(process)
        printed = _end_of(out, OUTCOME_BYTES)
        if code != 0:
            words = (_end_of(err, SHOWN_BYTES) or printed[-SHOWN_BYTES:]).strip()
            raise RolloutFailed(
                "error",
                f"command {command[0]!r}: {_ending(code)}; the end of its output:\n{words}",
            )
        return _outcome(command[0], printed)


def _ending(code: int) -> str:
    """Name an exit code, which is 128 and a signal's number where that has ended the program."""
    with suppress(ValueError):
        return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"


def _outcome(name: str, printed: str) -> Any:
    lines = printed.strip().splitlines()
    try:
        return orjson.loads(lines[-1]) if lines else None
    except orjson.JSONDecodeError as error:
        raise RolloutFailed(
            "result",
            f"command {name!r}: the last line of its output must be its outcome as JSON (a number,"
            f" numbers by name, or null), got {lines[-1][:200]!r}",
        ) from error


def _with_endpoint(given: Mapping[str, str], endpoint: Endpoint) -> dict[str, str]:
    """Return variables with those of the endpoint, which no proxy stands before."""
    host = "127.0.0.1"
    direct = {
        name: ",".join(filter(None, [given.get(name), host])) for name in ("NO_PROXY", "no_proxy")
    }
    return {
        **given,
        **direct,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
        "OPENAI_MODEL": endpoint.model,
    }


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program, with all that it started."""
    ended = asyncio.ensure_future(process.wait())
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait({ended}, timeout=END_COMMAND_S)
    with suppress(ProcessLookupError, PermissionError):  # none is left (macOS: only zombies)
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait({ended}, timeout=REAP_S)


def _end_of(file: IO[bytes], size: int) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    return file.read().decode(errors="replace")
