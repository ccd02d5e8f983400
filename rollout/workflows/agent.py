"""The workflow `agent`: a program that talks to an OpenAI-compatible endpoint makes the rollout."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from rlcore.boundary.child_environment import allowed_environment
from rlcore.data.generation import Generate
from rlcore.data.messages import Message
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rlcore.deadlines import CANCEL_S
from rlcore.errors import ConfigError, RolloutFailed
from rlcore.import_paths import place_of
from rollout.asyncio_utils import in_own_thread
from rollout.conversation.conversation import Conversation
from rollout.gateway.server import Endpoint, Gateway
from rollout.gateway.sessions import Session
from rollout.plugins import failure_of, load_object
from rollout.workflows.agent_command import run_command
from rollout.workflows.context import WorkflowContext, bound_options

KEY = "rollout.workflow"
ENVIRONMENT = f"{KEY}.environment"
Outcome = float | dict[str, float] | None


@dataclass(frozen=True)
class Task:
    """What a program is to do.

    Attributes:
        row: the columns of the row, and its `label`.
        messages: of the row, as the run renders them.
        tools: of the row, as JSON schemas.
    """

    row: dict[str, Any]
    messages: list[Message]
    tools: list[dict[str, Any]]


class AgentWorkflow:
    """Runs one program for each rollout, and trains on what it made the model write.

    Args:
        run: import path of `run(task, endpoint)`, which returns the outcome: a number, numbers by
            name, or None. Async ones run in the event loop of the rollouts, others in a thread.
        command: a program of its own instead, with its arguments; see `run_command`.
        environment: names of variables that a command gets beside PATH, HOME, USER and the like.
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
        self._options = dict(options or {})
        self._run, self._command = load_program(run, command, self._options, environment)
        self._environment = allowed_environment(environment, key=ENVIRONMENT)
        self._gateway = Gateway(self._token_text)

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Refuse keys of `rollout.workflow` that the constructor would refuse (ConfigError)."""
        given = bound_options(cls, "agent", options)
        load_program(
            given.get("run"),
            given.get("command"),
            given.get("options") or {},
            given.get("environment", ()),
        )

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        """Run the program to its end; one sample for each branch that its calls made.

        Raises:
            RolloutFailed: the program failed, or made no call.
            Exception: what made a call fail that is not the program's fault.
        """
        if prompt.messages is None:
            raise ConfigError(
                f"{KEY}: an agent needs a chat, and the prompts are texts: set data.as_chat: true,"
                " or give rows with messages"
            )
        conversation = self._context.conversation(prompt, draw, index, generate)
        # the program may change what it is given, which other rollouts and tries are given too
        task = deepcopy(self._task({"label": prompt.label} | prompt.row, conversation))
        session, endpoint = await self._gateway.open(conversation)
        drain = False
        try:
            outcome = await self._run_until_lost(session, task, endpoint)
            drain = True
        finally:
            await self._gateway.close(session, drain=drain)
        if session.failed.done():  # as an abandoned call was lost
            session.failed.result()
        conversation.measure("repeated_calls", session.repeated_calls)
        conversation.measure("abandoned_calls", session.abandoned_calls)
        return conversation.samples(outcome)

    def _task(self, row: Mapping[str, Any], conversation: Conversation) -> Task:
        return Task({**row}, conversation.messages, [*conversation.tools])

    async def _run_until_lost(self, session: Session, task: Task, endpoint: Endpoint) -> Outcome:
        """The program's outcome. It is ended as soon as the session has failed."""
        program = asyncio.ensure_future(self._guarded(task, endpoint))
        try:
            awaited: set[asyncio.Future[Any]] = {program, session.failed}
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if session.failed.done():
                session.failed.result()  # raises, unless the draw is to be made again
                return None
            if program.cancelled():
                raise RolloutFailed("error", f"{self._name()} was cancelled from within")
            return program.result()
        finally:
            if not program.done():
                program.cancel()
                await asyncio.wait({program}, timeout=CANCEL_S)
            if program.done() and not program.cancelled():
                program.exception()  # retrieved: it may be an effect of the session's

    async def _guarded(self, task: Task, endpoint: Endpoint) -> Outcome:
        """Run the program.

        Raises:
            RolloutFailed: whatever it raised. SystemExit would end the event loop.
        """
        try:
            if self._command is not None:
                found = await run_command(self._command, task, endpoint, self._environment)
            else:
                found = await self._called(task, endpoint)
        except RolloutFailed:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise failure_of(error) from error
        return _checked_outcome(found, self._name())

    async def _called(self, task: Task, endpoint: Endpoint) -> Any:
        assert self._run is not None
        options = deepcopy(self._options)
        if inspect.iscoroutinefunction(self._run):
            return await self._run(task, endpoint, **options)
        # not of a pool, whose threads may all wait for the rollouts that wait for a thread
        return await in_own_thread(self._run, task, endpoint, **options)

    def _token_text(self, token: int) -> str:
        return self._context.rules.decode(np.array([token], dtype=np.int32))

    def _name(self) -> str:
        if self._command is not None:
            return f"command {self._command[0]!r}"
        return f"{getattr(self._run, '__module__', '')}:{getattr(self._run, '__name__', self._run)}"


def load_program(
    run: str | None,
    command: Sequence[str] | None,
    options: Mapping[str, Any],
    environment: Sequence[str] = (),
) -> tuple[Callable[..., Any] | None, list[str] | None]:
    """Return the function, or else the command, of an agent.

    Raises:
        ConfigError: both or neither are given, it cannot be called, or `environment` is not for it.
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
        allowed_environment(environment, key=ENVIRONMENT)
        return None, _checked_command(command, options)
    if environment:
        raise ConfigError(
            f"{ENVIRONMENT}: a function runs in our process and has its variables: leave it out, or"
            " give a command"
        )
    assert run is not None
    return _loaded(run, options), None


def _loaded(path: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    found: Callable[..., Any] = load_object(path, {}, key=f"{KEY}.run")
    try:
        inspect.signature(found).bind("task", "endpoint", **options)
    except TypeError as error:
        given = "".join(f", {name}=" for name in options)
        raise ConfigError(
            f"{KEY}.run: {path} is called as run(task, endpoint{given}), but: {error}"
            f"{place_of(found)}"
        ) from error
    return found


def _checked_command(command: Any, options: Mapping[str, Any]) -> list[str]:
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
    return [*command]


def _checked_outcome(found: Any, name: str) -> Outcome:
    """Refuse what is neither a finite number, nor such numbers by name, nor None."""
    numbers = found if isinstance(found, Mapping) else {} if found is None else {"reward": found}
    for part, number in numbers.items():
        if not isinstance(number, Real) or not math.isfinite(number):
            raise RolloutFailed(
                "result",
                f"{name} returned {str(found)[:200]!r}, of which {part!r} is no finite number;"
                " expected a number, numbers by name, or None",
            )
    return None if found is None else {str(part): float(n) for part, n in numbers.items()}
