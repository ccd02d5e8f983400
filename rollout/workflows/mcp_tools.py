"""Tools of MCP servers, through the official package `mcp` (2.x)."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import orjson
from pydantic import Field, TypeAdapter, ValidationError, field_validator, model_validator

from rlcore.boundary import process_tree
from rlcore.boundary.child_environment import allowed_environment
from rlcore.config.messages import expected_by
from rlcore.config.secrets import mask_text
from rlcore.config.sections.base import Section, as_list
from rlcore.deadlines import CANCEL_S, MCP_CLOSE_S
from rlcore.errors import ConfigError, RolloutFailed
from rollout.asyncio_utils import gather_or_cancel
from rollout.conversation.tool_schemas import check_tools
from rollout.workflows import bounded_lines

KEY = "rollout.workflow.mcp"
ISOLATED = ("-I", "-S")
MAX_MESSAGE = 32 << 20  # bytes of a server's message; a larger one closes the session
MAX_RESULT = 4 << 20  # characters of a tool's result, checked before `max_tool_tokens` cuts it
INVALID_PARAMS = -32602  # JSON-RPC code for the caller's mistake, here the model's


class McpServerConfig(Section):
    """One entry of `rollout.workflow.mcp`: a `command` that is run, or the `url` of a server."""

    command: list[str] = Field(default_factory=list)
    """A program that speaks MCP on its input and output; with `shared`, one for all rollouts."""
    url: str | None = None
    """A server that somebody else runs (Streamable HTTP)."""
    shared: bool = False
    """One session for all rollouts, which then see each other's changes; default: one a rollout."""
    tools: list[str] | None = None
    """Only these of its tools; default: all."""
    environment: list[str] = Field(default_factory=list)
    """Names of variables that the program gets in addition to PATH, HOME, USER and the like."""
    api_key_env: str | None = None
    """The variable with the bearer token of the `url`."""
    start_timeout_s: float = Field(default=60.0, gt=0)
    """Longest time until it has listed its tools."""

    _one = field_validator("command", "environment", mode="before")(as_list)

    @model_validator(mode="after")
    def _one_of_two(self) -> McpServerConfig:
        if bool(self.command) == bool(self.url):
            raise ValueError("expected either command or url")
        if self.url and self.api_key_env is not None and urlsplit(self.url).username:
            raise ValueError("either a user in the URL or `api_key_env`: a request has one of them")
        if self.command and shutil.which(self.command[0]) is None:
            raise ValueError(f"a program that is there; {self.command[0]!r} is not in PATH")
        return self

    def __str__(self) -> str:
        return mask_text(self.url) if self.url else self.command[0]


class ToolError(Exception):
    """An error that the model gets as a tool's result; the rollout continues."""


class McpFailed(RolloutFailed):
    """A server did not start or answer in time, or closed. The rollout fails, but not the run."""

    def __init__(self, message: str) -> None:
        super().__init__("mcp", message)


class McpTools:
    """The servers of a workflow, given as entries of `rollout.workflow.mcp`.

    Raises:
        ConfigError: an entry is invalid, or the package is missing.
    """

    def __init__(self, given: Sequence[Mapping[str, Any]]) -> None:
        try:
            self._servers = TypeAdapter(list[McpServerConfig]).validate_python(given)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join([KEY, *map(str, first["loc"])])
            raise ConfigError(f"{where}: expected {expected_by(first)}") from error
        for server in self._servers:
            _library()
            allowed_environment(server.environment, key=f"{KEY}.environment")
        self._shared: dict[int, McpSession] = {}
        self._starting = asyncio.Lock()

    def __bool__(self) -> bool:
        return bool(self._servers)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[dict[str, McpSession]]:
        """Open the sessions of one rollout, by the name of each tool.

        Raises:
            McpFailed: a server does not start.
            ConfigError: two servers have a tool of the same name.
        """
        sessions: list[McpSession] = []
        try:
            for number, server in enumerate(self._servers):
                sessions.append(
                    await self._shared_session(number, server)
                    if server.shared
                    else McpSession(server)
                )
                sessions[-1].users += 1
            await gather_or_cancel(*(s.start() for s in sessions if not s.shared))
            found: dict[str, McpSession] = {}
            for session in sessions:
                for name in session.schemas:
                    if name in found:
                        raise ConfigError(
                            f"{KEY}: {found[name]} and {session} both have a tool {name!r}: name"
                            " those that you want in `tools` of each"
                        )
                    found[name] = session
            yield found
        finally:
            for session in sessions:
                session.users -= 1
            over = [s for s in sessions if not s.users and (s.broken or not s.shared)]
            await gather_or_cancel(*(session.close() for session in over))

    async def _shared_session(self, number: int, server: McpServerConfig) -> McpSession:
        """The session that all rollouts share, started (again) if there is none.

        It ends with the loop of the service, which cancels its task.
        """
        async with self._starting:
            session = self._shared.get(number)
            if session is None or session.ended or session.broken:
                session = McpSession(server)
                await session.start()
                self._shared[number] = session
            return session


class McpSession:
    """A connection to one server.

    It lives in its own task, since the package's contexts must be exited by the task that
    entered them, and may cancel that task when the transport breaks.
    """

    def __init__(self, server: McpServerConfig) -> None:
        self._server = server
        self._ready = asyncio.Event()
        self._leave = asyncio.Event()
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None
        self.shared = server.shared
        # number of rollouts that use the session now
        self.users = 0
        # a call was not answered: new rollouts get another session
        self.broken = False
        # the tools as JSON schemas for a chat template, by name
        self.schemas: dict[str, dict[str, Any]] = {}

    def __str__(self) -> str:
        return f"the MCP server {str(self._server)!r}"

    @property
    def ended(self) -> bool:
        """Whether the connection is closed."""
        return self._task is None or self._task.done()

    async def start(self) -> None:
        """Connect and list the tools. Raises McpFailed, after cleaning up."""
        self._task = asyncio.create_task(self._live(), name=str(self))
        ready = asyncio.ensure_future(self._ready.wait())
        limit_s = self._server.start_timeout_s
        try:
            await self._or_the_end(ready, limit_s)
            if self._task.done():
                raise McpFailed(f"{self} ended at its start: {self._why()}")
            if not self._ready.is_set():
                raise McpFailed(f"{self} listed no tools in {limit_s:g} s ({KEY}.start_timeout_s)")
        except BaseException:
            await self.close()
            raise
        finally:
            ready.cancel()

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Call a tool; return the text of its result.

        Raises:
            ToolError: the tool reports an error, or refuses the arguments.
            McpFailed: no answer came; the session is broken then.
        """
        call = asyncio.ensure_future(self._client.call_tool(name, dict(arguments)))
        try:
            await self._or_the_end(call, timeout_s)
            if not call.done():
                self.broken = True
                why = self._why() if self.ended else f"{timeout_s:g} s (tool_timeout_s) have passed"
                raise McpFailed(f"{self} did not answer a call of {name!r}: {why}")
        finally:
            call.cancel()
        try:
            result = call.result()
        except Exception as error:
            if getattr(error, "code", None) == INVALID_PARAMS:
                raise ToolError(f"{name}: {error}") from error
            self.broken = True
            raise McpFailed(f"{self} gave no answer to a call of {name!r}: {error}") from error
        text = _text(result)
        if len(text) > MAX_RESULT:
            raise ToolError(f"the result of {name} has {len(text):,} characters: too many to read")
        if result.is_error:
            raise ToolError(text or f"{name} failed")
        return text

    async def _or_the_end(self, awaited: asyncio.Future[Any], timeout_s: float) -> None:
        """Wait for `awaited`, the end of the connection, or the timeout."""
        assert self._task is not None
        both: set[asyncio.Future[Any]] = {awaited, self._task}
        await asyncio.wait(both, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def close(self) -> None:
        """Close the connection, and end the processes that we started."""
        if self._task is None:
            return
        if self._ready.is_set():
            self._leave.set()
            await asyncio.wait({self._task}, timeout=MCP_CLOSE_S)
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=CANCEL_S)

    async def _live(self) -> None:
        async with self._connection() as client:
            self._client = client
            self.schemas = await self._listed(client)
            self._ready.set()
            await self._leave.wait()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Any]:
        mcp = _library()
        server = self._server
        if server.command:
            bounded = [sys.executable, *ISOLATED, bounded_lines.__file__, str(MAX_MESSAGE)]
            parameters = mcp.StdioServerParameters(
                command=sys.executable,
                # its children end with it, and it ends when we end, for whatever reason
                args=[*ISOLATED, process_tree.__file__, *bounded, *server.command],
                env=allowed_environment(server.environment, key=f"{KEY}.environment"),
            )
            transport = mcp.stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)
            async with mcp.Client(transport) as client:
                yield client
            return
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        key = os.environ.get(server.api_key_env or "")
        headers = {"Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        hooks = {"response": [_bound_answer]}
        # no timeout here: calls have their own deadlines
        async with httpx2.AsyncClient(headers=headers, timeout=None, event_hooks=hooks) as http:
            transport = streamable_http_client(str(server.url), http_client=http)
            async with mcp.Client(transport) as client:
                yield client

    async def _listed(self, client: Any) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        page = await client.list_tools()
        listed = [*page.tools]
        while page.next_cursor is not None:
            page = await client.list_tools(cursor=page.next_cursor)
            listed += page.tools
        for tool in listed:
            function = {
                "name": tool.name,
                "description": tool.description or tool.title or "",
                "parameters": tool.input_schema,
            }
            found[tool.name] = {"type": "function", "function": function}
        wanted = found if self._server.tools is None else self._server.tools
        if missing := [name for name in wanted if name not in found]:
            raise McpFailed(f"it has no tool {missing[0]!r}; it has {', '.join(found) or 'none'}")
        check_tools([found[name] for name in wanted])
        return {name: found[name] for name in wanted}

    def _why(self) -> str:
        """The reason for the end of the task."""
        error: BaseException | None = None
        if self._task is not None and self._task.done() and not self._task.cancelled():
            error = self._task.exception()
        # unwrap the exception groups of the package's task groups
        while inner := getattr(error, "exceptions", None):
            error = inner[0]
        return str(error or "the connection was closed") or type(error).__name__


def _library() -> Any:
    try:
        import mcp
    except ImportError as error:
        raise ConfigError(
            f"{KEY}: MCP servers need the extra: pip install 'rlcore[mcp]' ({error})"
        ) from error
    return mcp


async def _bound_answer(response: Any) -> None:
    """Count the bytes of an HTTP answer while they are read, and limit them."""
    import httpx2

    if "Content-Encoding" in response.headers:
        raise httpx2.DecodingError("the answer is compressed, which was not asked for")
    given = response.stream

    class Bounded(httpx2.AsyncByteStream):
        aclose = given.aclose

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for chunk in given:
                size += len(chunk)
                if size > MAX_MESSAGE:
                    raise httpx2.ReadError(f"the answer has more than {MAX_MESSAGE:,} bytes")
                yield chunk

    response.stream = Bounded()


def _text(result: Any) -> str:
    """The texts of a result; other content is only named, since the model cannot see it."""
    parts = []
    for block in result.content:
        text = getattr(block, "text", None) or getattr(
            getattr(block, "resource", None), "text", None
        )
        parts.append(text if isinstance(text, str) else f"[{block.type}]")
    if not parts and result.structured_content is not None:
        return orjson.dumps(result.structured_content).decode()
    return "\n".join(parts)
