"""The workflow `agent`: a program with an OpenAI-compatible endpoint makes the rollout."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from typing import IO, Any

import numpy as np
import orjson

from rlcore.boundary import process_tree
from rlcore.boundary.child_environment import allowed_environment
from rlcore.data.generation import Generate
from rlcore.data.messages import Message
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rlcore.deadlines import END_COMMAND_S, REAP_S
from rlcore.errors import ConfigError, RolloutFailed
from rlcore.import_paths import location_of
from rollout.asyncio_utils import cancel, in_own_thread
from rollout.gateway.server import Endpoint, Gateway
from rollout.gateway.sessions import Session
from rollout.plugins import failure_of, load_object
from rollout.workflows.context import WorkflowContext, checked_outcome

KEY = "rollout.workflow"
ENVIRONMENT = f"{KEY}.environment"
Outcome = dict[str, float] | None
SHOWN_BYTES = 2000  # shown end of a command's output, in errors
OUTCOME_BYTES = 1 << 16  # end of its output that is read for the last line


@dataclass(frozen=True)
class Task:
    """The task of a program: the columns of its row with its `label`, its messages and tools."""

    row: dict[str, Any]
    messages: list[Message]
    tools: list[dict[str, Any]]


Program = Callable[[Task, Endpoint], Awaitable[Any]]


class AgentWorkflow:
    """Runs one program for each rollout, and trains on what the model wrote for it.

    Args:
        run: import path of `run(task, endpoint)`, which returns the outcome: a number, numbers by
            name, or None. An async function runs in the event loop, any other in a thread.
        command: an external program instead, with its arguments; see `run_command`.
        environment: names of variables that a command gets in addition to PATH, HOME, USER and
            the like.
        options: further keyword arguments of `run`.
    """

    def __init__(
        self,
        context: WorkflowContext,
        *,
        run: str | None = None,
        command: Sequence[str] | None = None,
        environment: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._context = context
        # columns added to every row
        self._row: dict[str, Any] = {}
        self._name, self._program = load_program(run, command, options or {}, environment)
        self._gateway = Gateway(lambda token: context.decode(np.array([token], dtype=np.int32)))

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        """Run the program to its end; one sample for each branch that its calls made.

        Raises:
            RolloutFailed: the program failed, or made no call.
            Exception: a call failed through no fault of the program; its error.
        """
        if prompt.messages is None:
            raise ConfigError(
                f"{KEY}: an agent needs a chat, and the prompts are texts: set data.as_chat: true,"
                " or give rows with messages"
            )
        conversation = self._context.conversation(prompt, draw, index, generate)
        # a copy, since the program may change the row, which other rollouts and tries share
        row = deepcopy({"label": prompt.label} | prompt.row | self._row)
        task = Task(row, deepcopy(conversation.messages), deepcopy([*conversation.tools]))
        session, endpoint = await self._gateway.open(conversation)
        drain = False
        try:
            outcome = await self._run_until_lost(session, task, endpoint)
            drain = True
        finally:
            await self._gateway.close(session, drain=drain)
        # as a call was lost, though the program has ended
        if session.failed.done():
            session.failed.result()
        conversation.measure("repeated_calls", session.repeated_calls)
        conversation.measure("abandoned_calls", session.abandoned_calls)
        return conversation.samples(outcome)

    async def _run_until_lost(self, session: Session, task: Task, endpoint: Endpoint) -> Outcome:
        """The program's outcome. The program is ended as soon as the session fails."""
        program = asyncio.ensure_future(self._guarded(task, endpoint))
        # retrieve its exception, which may be a consequence of the session's failure
        program.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            awaited: set[asyncio.Future[Any]] = {program, session.failed}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                # raises, unless an aborted turn requires another draw
                session.failed.result()
                return None
            if program.cancelled():
                raise RolloutFailed("error", f"{self._name} was cancelled from within")
            return program.result()
        finally:
            if not program.done():
                await cancel(program)

    async def _guarded(self, task: Task, endpoint: Endpoint) -> Outcome:
        """Run the program. All that it raises, SystemExit too, becomes RolloutFailed."""
        try:
            found = await self._program(task, endpoint)
        except RolloutFailed:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise failure_of(error) from error
        return checked_outcome(found, self._name)


def load_program(
    run: str | None,
    command: Sequence[str] | None,
    options: Mapping[str, Any],
    environment: Sequence[str],
) -> tuple[str, Program]:
    """The name of an agent's function or command, and a callable that runs it.

    Raises:
        ConfigError: both or neither are given, it cannot be called, or it takes no `environment`.
    """
    if (run is None) == (command is None):
        raise ConfigError(
            f"{KEY}: agent needs either run (package.module:function) or command (a program and"
            f" its arguments), got {'neither' if run is None else 'both'}"
        )
    if isinstance(environment, str) or not all(isinstance(name, str) for name in environment):
        raise ConfigError(
            f"{ENVIRONMENT}: got {environment!r}, expected a list of names of variables"
        )
    if command is not None:
        _check_command(command, options)
        given = allowed_environment(environment, key=ENVIRONMENT)
        # bypass proxies for the endpoint
        for name in ("NO_PROXY", "no_proxy"):
            given[name] = ",".join(filter(None, [given.get(name), "127.0.0.1"]))
        return f"command {command[0]!r}", partial(run_command, command, environment=given)
    if environment:
        raise ConfigError(
            f"{ENVIRONMENT}: a function runs in our process and has its variables: leave it out, or"
            " give a command"
        )
    found: Callable[..., Any] = load_object(str(run), {}, key=f"{KEY}.run")
    try:
        inspect.signature(found).bind("task", "endpoint", **options)
    except TypeError as error:
        keywords = "".join(f", {name}=" for name in options)
        raise ConfigError(
            f"{KEY}.run: {run} is called as run(task, endpoint{keywords}), but: {error}"
            f"{location_of(found)}"
        ) from error
    name = f"{getattr(found, '__module__', '')}:{getattr(found, '__name__', found)}"
    return name, partial(_call, found, options)


async def _call(
    function: Callable[..., Any], options: Mapping[str, Any], task: Task, endpoint: Endpoint
) -> Any:
    own = deepcopy(options)
    if inspect.iscoroutinefunction(function):
        return await function(task, endpoint, **own)
    # not a thread of a pool, whose threads may all wait for rollouts that wait for a thread
    return await in_own_thread(function, task, endpoint, **own)


def _check_command(command: Any, options: Mapping[str, Any]) -> None:
    if (
        not isinstance(command, list | tuple)
        or not command
        or not all(isinstance(part, str) for part in command)
    ):
        raise ConfigError(
            f"{KEY}.command: got {command!r}, expected a list of texts: a program and its"
            " arguments, [python, agent.py]"
        )
    if options:
        raise ConfigError(
            f"{KEY}.options: a command takes none; give it arguments: command: [python, agent.py,"
            " --fast]"
        )


async def run_command(
    command: Sequence[str], task: Task, endpoint: Endpoint, environment: Mapping[str, str]
) -> Any:
    """Run a program; the outcome is the JSON value on the last line of its standard output.

    It gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL besides the `environment`, and the task
    as JSON on its standard input. When it ends, or this call is cancelled, all its descendants are
    killed (on Linux; elsewhere its process group).

    Raises:
        RolloutFailed: it cannot be started, its exit code is not 0 (with the end of its output),
            or its last line is not JSON.
    """
    # files, since a full pipe would block the program, and its children could keep a pipe open
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
            env={
                **environment,
                "OPENAI_BASE_URL": endpoint.base_url,
                "OPENAI_API_KEY": endpoint.api_key,
                "OPENAI_MODEL": endpoint.model,
            },
            # so that its whole process group can be killed
            start_new_session=True,
        )
        try:
            code = await process.wait()
        finally:
            await _end(process)
        printed = _end_of(out, OUTCOME_BYTES)
        if code != 0:
            words = (_end_of(err, SHOWN_BYTES) or printed[-SHOWN_BYTES:]).strip()
            ending = f"exit code {code}"
            # 128 plus the number of a signal means that the signal ended the program
            with suppress(ValueError):
                ending = f"killed by {signal.Signals(code - 128).name}"
            raise RolloutFailed(
                "error", f"command {command[0]!r}: {ending}; the end of its output:\n{words}"
            )
    lines = printed.strip().splitlines()
    try:
        return orjson.loads(lines[-1]) if lines else None
    except orjson.JSONDecodeError as error:
        raise RolloutFailed(
            "result",
            f"command {command[0]!r}: the last line of its output must be its outcome as JSON (a"
            f" number, numbers by name, or null), got {lines[-1][:200]!r}",
        ) from error


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the program with all its descendants."""
    ended = asyncio.ensure_future(process.wait())
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait({ended}, timeout=END_COMMAND_S)
    # no process is left (on macOS: only zombies)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait({ended}, timeout=REAP_S)


def _end_of(file: IO[bytes], size: int) -> str:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - size))
    return file.read().decode(errors="replace")
