"""The workflow `env`: the policy uses an environment, a class with tools or with `step`."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from rlcore.data.generation import Generate
from rlcore.data.messages import Message
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rlcore.errors import ConfigError, DeadlineExceeded, RolloutFailed
from rlcore.import_paths import location_of
from rlcore.timeline.recorder import TrackAllocator, of_group
from rollout.asyncio_utils import gather_or_cancel, in_thread, within
from rollout.conversation.conversation import Conversation
from rollout.conversation.reply import ToolCall
from rollout.plugins import failure_of, load_object
from rollout.workflows.context import WorkflowContext, checked_outcome
from rollout.workflows.mcp_tools import McpSession, McpTools, ToolError

KEY = "rollout.workflow.env"
CUT = "\n[cut: the result is longer than max_tool_tokens]"
MAX_WARNINGS = 5  # logged failures of close()
logger = logging.getLogger(__name__)
__all__ = ["EnvironmentWorkflow", "Step", "ToolError", "tools_of"]
_OWN = frozenset({"reset", "step", "reward", "close"})  # methods that are not tools


@dataclass(frozen=True)
class Step:
    """An environment's answer to a turn of the model."""

    messages: Sequence[Message] = ()
    reward: float = 0.0  # reward of the turn
    done: bool = False


class EnvironmentWorkflow:
    """Runs one environment object for each rollout.

    Its class may have, all of them sync or async: `reset(row) -> messages or None`, public typed
    methods, which are tools, or `step(reply) -> Step`, `reward(conversation) -> number or numbers
    by name`, and `close()`.

    Args:
        env: import path of the class; optional if `mcp` is given.
        mcp: servers whose tools the policy can call in addition to those of the class.
        options: keyword arguments of its constructor.
        tool_timeout_s: limit of one method call; the rollout fails after it.
        max_tool_tokens: limit of a tool's result; the rest is cut off.
    """

    def __init__(
        self,
        context: WorkflowContext,
        *,
        env: str | None = None,
        mcp: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        tool_timeout_s: float = 60.0,
        max_tool_tokens: int | None = None,
    ) -> None:
        self._context = context
        self._options = dict(options or {})
        self._tool_timeout_s = tool_timeout_s
        self._max_tool_tokens = max_tool_tokens
        self._mcp = McpTools(mcp)
        # tracks of the timeline for concurrent calls
        self._tracks = TrackAllocator("tools", "call")
        self._class, self._tools = load_environment(env, self._options, mcp=bool(self._mcp))
        self._closing: set[asyncio.Task[None]] = set()
        self._unclosed = 0

    async def rollout(
        self, prompt: Prompt, draw: int, index: int, generate: Generate
    ) -> list[Sample]:
        """Run one environment to its end; one sample for each leaf of its conversation."""
        async with self._mcp.connected() as remote:
            if both := sorted(remote.keys() & self._tools):
                raise ConfigError(f"{KEY}: {remote[both[0]]} has a tool {both[0]!r} too")
            tools = [*self._tools.values(), *(remote[name].schemas[name] for name in remote)]
            # a copy, since the environment may change the options, which other rollouts share
            environment = self._class(**deepcopy(self._options))
            try:
                conversation = self._context.conversation(
                    prompt, draw, index, generate, tools=tools
                )
                if hasattr(environment, "reset"):
                    row = deepcopy({"label": prompt.label} | prompt.row)
                    given = await self._call(environment.reset, row)
                    await conversation.append(given or ())
                await self._converse(environment, conversation, remote)
                outcome = None
                if hasattr(environment, "reward"):
                    found = await self._call(environment.reward, conversation)
                    outcome = checked_outcome(found, "reward()", location_of(environment.reward))
                return conversation.samples(outcome)
            finally:
                if hasattr(environment, "close"):
                    closing = asyncio.ensure_future(self._close(environment))
                    self._closing.add(closing)
                    closing.add_done_callback(self._closing.discard)
                    # shielded from the cancellation of a rollout that is given up
                    await asyncio.shield(closing)

    async def _close(self, environment: Any) -> None:
        """Close an environment; its failure does not affect the rollout."""
        try:
            await self._call(environment.close)
        except Exception as error:  # noqa: BLE001 - recovery: the rollout is over either way
            self._unclosed += 1
            if self._unclosed <= MAX_WARNINGS:
                logger.warning("%s: close() of %s failed: %s", KEY, self._class.__name__, error)

    async def _converse(
        self, environment: Any, conversation: Conversation, remote: Mapping[str, McpSession]
    ) -> None:
        """Alternate turns until one side ends the conversation."""
        while True:
            reply = await conversation.generate()
            if reply.finish_reason != "stop":
                break
            if reply.calls and (self._tools or remote):
                began = time.perf_counter()
                results = await gather_or_cancel(
                    *(self._use(environment, call, remote) for call in reply.calls)
                )
                conversation.measure("tool_s", time.perf_counter() - began)
                conversation.measure("tool_calls", len(results))
                conversation.measure("tool_errors", sum(failed for _, failed in results))
                await conversation.append([message for message, _ in results])
            elif hasattr(environment, "step"):
                step = await self._call(environment.step, reply)
                if not isinstance(step, Step):
                    raise RolloutFailed(
                        "result",
                        f"step() returned {step!r}, expected a Step",
                        location_of(environment.step),
                    )
                if step.reward:
                    conversation.reward(step.reward)
                if step.done or not step.messages:
                    break
                await conversation.append(step.messages)
            else:
                break

    async def _use(
        self, environment: Any, call: ToolCall, remote: Mapping[str, McpSession]
    ) -> tuple[Message, bool]:
        """Call a tool; return its message and whether it is an error."""
        try:
            if call.error or call.arguments is None:
                raise ToolError(call.error)
            if call.name in remote:
                session = remote[call.name]
                with self._tracks.span(call.name, **of_group()):
                    result = await session.call(call.name, call.arguments, self._tool_timeout_s)
            elif call.name in self._tools:
                method = getattr(environment, call.name)
                result = str(await self._call(method, **call.arguments))
            else:
                known = ", ".join([*self._tools, *remote])
                raise ToolError(f"there is no tool {call.name!r}; there is {known}")
            content = self._fitting(result)
            failed = False
        except ToolError as error:
            content = f"error: {error}"
            failed = True
        message = {
            "role": "tool",
            "tool_call_id": call.id,
            "name": call.name or "unknown",
            "content": content,
        }
        return message, failed

    def _fitting(self, text: str) -> str:
        limit = self._max_tool_tokens
        # a token has at least one character
        if limit is None or len(text) <= limit:
            return text
        tokenizer = self._context.tokenizer
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return text if len(ids) <= limit else str(tokenizer.decode(ids[:limit])) + CUT

    async def _call(self, method: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Call a method under the deadline, in a thread if it is not async."""
        limit_s = self._tool_timeout_s
        late = (
            f"{self._class.__name__}.{method.__name__} took more than {limit_s:g} s"
            " (rollout.workflow.tool_timeout_s)"
        )
        try:
            with self._tracks.span(method.__name__, **of_group()):
                return await within(limit_s, _run(method, *given, **named), lambda: late)
        except DeadlineExceeded as error:
            raise RolloutFailed("timeout", str(error), location_of(method)) from error


async def _run(method: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Call a method, and catch its `sys.exit`, which would stop asyncio."""
    try:
        if inspect.iscoroutinefunction(method):
            return await method(*given, **named)
        return await in_thread(method, *given, **named)
    except (SystemExit, KeyboardInterrupt) as error:
        raise failure_of(error) from error


def load_environment(
    env: str | None, options: Mapping[str, Any], *, mcp: bool = False
) -> tuple[type, dict[str, dict[str, Any]]]:
    """The class of an environment, optional if there are servers (`mcp`), and its tools' schemas.

    Raises:
        ConfigError: the class is missing, does not take the options, or is contradictory.
    """
    if env is None and not mcp:
        raise ConfigError(f"{KEY}: missing: name a class, package.module:Class, or give `mcp`")
    found = object if env is None else load_object(env, {}, key=KEY)
    tools = tools_of(found)
    try:
        inspect.signature(found).bind(**options)
    except TypeError as error:
        raise ConfigError(f"rollout.workflow.options: {env}: {error}") from error
    if (tools or mcp) and hasattr(found, "step"):
        raise ConfigError(
            f"{KEY}: {env} has both tools ({', '.join(tools) or 'those of mcp'}) and step(); take"
            " one of them, and begin the names of other methods with an underscore"
        )
    return found, tools


def tools_of(environment: type) -> dict[str, dict[str, Any]]:
    """The JSON schemas of the public methods that are tools, by name.

    Raises:
        ConfigError: a method has no types, or its docstring does not describe each argument.
    """
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    found = {}
    for name, method in inspect.getmembers(environment, inspect.isroutine):
        own = inspect.getattr_static(environment, name)
        if not inspect.isfunction(own) and not isinstance(own, staticmethod | classmethod):
            # inherited from a built-in class, such as dict.get
            continue
        if name.startswith("_") or name in _OWN:
            continue
        try:
            # the signature as of a bound method, without creating an object
            method = method.__get__(object()) if method is own else method
            found[name] = get_json_schema(method)
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise ConfigError(
                f"{KEY}: {environment.__name__}.{name} is a public method, and so a tool, but:"
                f" {error}. Give it types and a docstring with Args, or an underscore"
            ) from error
    return found
