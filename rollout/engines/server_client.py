"""The HTTP client of an engine server: JSON both ways, a deadline for every call, and errors that
name the side at fault.

The module adds rules to aiohttp: nothing is sent twice, no redirect is followed, no cookie is kept,
and an unrequested answer is dropped.
"""

from __future__ import annotations

import asyncio
import io
from typing import Any, Literal, NoReturn

import aiohttp
import orjson
from yarl import URL

from rlcore.boundary.http_server import TooLong
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.training import TLSConfig
from rlcore.deadlines import BROKEN_CONNECTION_S
from rlcore.errors import EngineFailed, EngineHangs, RlcoreError, UserError
from rlcore.tls import engine_client, refused_engine
from rollout.engines.child_process import Server
from rollout.engines.factories import ADMIN_KEY, API_KEY, Keys
from rollout.engines.routed_records import parse
from rollout.json_client import read_answer

# Below the 5 s after which SGLang closes an idle connection: a request must never be written to a
# connection that is being closed.
KEEP_ALIVE_S = 3.0
JOINED_BYTES = 1 << 16  # a larger body is sent in parts, as fast as the server takes them
CONTROL_BYTES = 64 << 20  # limit of an answer without completions
QUOTED = 500  # characters quoted from a server's answer
# The keys of `rollout.engine` that limit calls.
Limit = Literal["update_timeout_s", "health_timeout_s"]
ANOTHER_MAY_SERVE = {408, 429}  # the 4xx that are the server's fault, not the request's


class ServerClient:
    """Talks to the server at `url`. Use it from one event loop.

    Each concurrent call has a connection; the caller limits their number. Cancelling a call closes
    its connection, upon which the server drops the request.
    """

    # beyond `update_timeout_s`
    grace_s = 0.0

    def __init__(
        self, name: str, url: str, keys: Keys, *, config: EngineConfig, tls: TLSConfig | None = None
    ) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.config = config
        self._tls = tls
        self._keys = keys
        # by route
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def post(
        self,
        route: str,
        body: dict[str, Any],
        *,
        limit: Limit | None = "update_timeout_s",
        times: int = 1,
        admin: bool = False,
        answer_bytes: int = CONTROL_BYTES,
    ) -> Any:
        """Send `body` and return the JSON value that the server answers.

        An answer that is not JSON is returned as text, an empty one as None.

        Args:
            body: JSON-able; numpy arrays are written as lists.
            limit: the key that limits connecting, sending and the whole answer together; None: the
                caller cancels the call in time.
            times: factor on that limit, for a server that queues so many calls.
            admin: whether the route controls the server and needs the admin key.
            answer_bytes: the size of the longest answer.

        Raises:
            UserError: the request itself is invalid, with the server's reason.
            EngineFailed: the server is dead, in trouble, or answers invalid JSON or too much;
                EngineHangs after `limit`.
        """
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        return await self._call("POST", route, data, limit, admin, answer_bytes, times)

    async def get(self, route: str, *, admin: bool = False) -> Any:
        """Ask for `route`, within the limit of a probe, and return the answer as `post` does."""
        return await self._call("GET", route, None, "health_timeout_s", admin, CONTROL_BYTES)

    async def close(self) -> None:
        """Close the connections; calls in flight fail. May be called twice."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _call(
        self,
        method: str,
        route: str,
        body: bytes | None,
        limit: Limit | None,
        admin: bool,
        answer_bytes: int,
        times: int = 1,
    ) -> Any:
        session = self._open()
        timeout_s: float | None = None if limit is None else times * getattr(self.config, limit)
        total_s = timeout_s
        if timeout_s is not None and limit == "update_timeout_s":
            total_s = timeout_s + self.grace_s
        try:
            async with session.request(
                method,
                self._urls.get(route) or self._url(route),
                data=io.BytesIO(body) if body and len(body) > JOINED_BYTES else body,
                headers=self._authorization(admin=True) if admin else None,
                timeout=aiohttp.ClientTimeout(total=total_s),
                allow_redirects=False,
                middlewares=(only_once,) if body is None else None,
            ) as response:
                content = await read_answer(response, answer_bytes)
        except TooLong as error:
            raise EngineFailed(
                f"engine {self.name} at {self.url} answered {route} with {error}, which no answer"
                " to it has"
            ) from error
        except TimeoutError:
            raise EngineHangs(
                f"engine {self.name} did not answer {route} within {timeout_s:g} s"
                f" (rollout.engine.{limit})"
            ) from None
        # ValueError: the URL's host is no host's name
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if (why := refused_engine(error, self.url, self._tls)) is not None:
                raise UserError(f"engine {self.name}: {why}") from error
            raise EngineFailed(
                f"engine {self.name} at {self.url} broke off {route}: {described(error)}"
            ) from error
        # After `close`, an answer without a length is cut off where we disconnected.
        if self._closed:
            raise self._is_closed()
        if not 200 <= response.status < 300:
            raise self._refusal(route, response.status, content)
        if response.content_type != "application/json":
            return content.decode(errors="replace") or None
        try:
            return parse(content)
        except orjson.JSONDecodeError as error:
            raise EngineFailed(
                f"engine {self.name} answered {route} with no JSON ({error}): {quoted(content)}"
            ) from error

    def _open(self) -> aiohttp.ClientSession:
        """The session, made in the event loop that uses it."""
        if self._closed:
            raise self._is_closed()
        if self._session is None:
            headers = {
                "Content-Type": "application/json",
                "Accept-Encoding": "identity",
                "User-Agent": "rlcore",
            }
            self._session = aiohttp.ClientSession(
                connector=Connector(
                    limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=engine_client(self._tls, self.url)
                ),
                headers=headers | self._authorization(admin=False),
                cookie_jar=aiohttp.DummyCookieJar(),
                response_class=AskedResponse,
                auto_decompress=False,
            )
        return self._session

    def _url(self, route: str) -> URL:
        url = URL(f"{self.url}{route}", encoded=True).with_user(None)
        self._urls[route] = url
        return url

    def _authorization(self, *, admin: bool) -> dict[str, str]:
        secret, variable = (self._keys.admin, ADMIN_KEY) if admin else (self._keys.api, API_KEY)
        if not secret.isprintable():
            raise UserError(
                f"{variable} has characters in it that HTTP cannot carry, like the end of a line"
            )
        return {"Authorization": f"Bearer {secret}"}

    def _is_closed(self) -> EngineFailed:
        return EngineFailed(f"engine {self.name}: its client is closed")

    def _refusal(self, route: str, status: int, content: bytes) -> RlcoreError:
        where = f"engine {self.name} at {self.url}"
        if status in (401, 403):
            return UserError(
                f"{where} refused our key for {route} (HTTP {status}): "
                f"set {API_KEY} and {ADMIN_KEY} to those of the server"
            )
        kind = (
            UserError if 400 <= status < 500 and status not in ANOTHER_MAY_SERVE else EngineFailed
        )
        return kind(f"{where} refused {route} (HTTP {status}): {server_words(content)}")


class Connector(aiohttp.TCPConnector):
    """Cancels unfinished connections at once when it is closed.

    aiohttp waits for them: calls to an engine whose machine is gone would hang for minutes.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self._making: set[asyncio.Task[Any]] = set()

    async def _create_connection(self, *given: Any) -> Any:
        making = asyncio.create_task(super()._create_connection(*given))
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        try:
            await asyncio.wait({making})
        except asyncio.CancelledError:
            making.add_done_callback(close_unused)
            making.cancel()
            raise
        if making.cancelled():
            raise aiohttp.ClientConnectionError("the client was closed")
        return making.result()

    def close(self, **given: Any) -> Any:
        for task in self._making:
            task.cancel()
        return super().close(**given)


async def raise_explained(error: EngineFailed, server: Server) -> NoReturn:
    """Raise the error, or the end of the server's log if its process has ended.

    A process drops its connections a moment before it is seen dead.
    """
    ended = server.ended
    if ended is None or isinstance(error, EngineHangs):
        raise error
    await asyncio.wait({ended}, timeout=BROKEN_CONNECTION_S)
    if not ended.done():
        raise error
    raise EngineFailed(f"engine {server.name} died: {server.describe_end()}") from error


def close_unused(making: asyncio.Task[Any]) -> None:
    """Close a connection that was made just as its call was cancelled."""
    if not making.cancelled() and making.exception() is None:
        making.result().close()


class AskedResponse(aiohttp.ClientResponse):
    """Refuses an answer if the connection had unread bytes before the request was sent.

    Those bytes do not answer this request, but aiohttp would take them for its answer.
    """

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        if connection.protocol is None or connection.protocol.should_close:
            raise aiohttp.ClientConnectionError("the connection carried an answer to no request")
        return await super().start(connection)


async def only_once(
    request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType
) -> aiohttp.ClientResponse:
    """Keep aiohttp from repeating a GET after its connection broke, as it does for two errors."""
    try:
        return await send(request)
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError) as error:
        raise aiohttp.ClientConnectionError(str(error)) from error


def server_words(content: bytes) -> str:
    """The server's reason for an error, in any of its formats."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        return quoted(content)
    for name in ("error", "message", "detail"):
        while isinstance(value, dict) and name in value:
            value = value[name]
    return value[:QUOTED] if isinstance(value, str) else quoted(content)


def quoted(content: bytes) -> str:
    """The beginning of an answer, for a message."""
    text = content[:QUOTED].decode(errors="replace").strip()
    return text or "(nothing said)"


def described(error: BaseException) -> str:
    """The kind of the error, and its text if there is one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
