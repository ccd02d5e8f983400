"""The wire to one SGLang server: JSON both ways, a deadline for every call, errors that say who is
to blame.
"""

from __future__ import annotations

from typing import Any

import orjson

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import EngineFailed, EngineHangs, UserError
from rollout.engines.sglang.connections import Connections, DeadlinePassed
from rollout.engines.sglang.keys import ADMIN_KEY, API_KEY, Keys

QUOTED = 500  # characters of a server's own words
ANOTHER_MAY_SERVE = {408, 429}  # of the 4xx: the server's trouble, not the request's


class ServerClient:
    """Talks to the server at `url`. Use it from one event loop; what it may carry at a time is for
    its caller to limit.

    Cancelling a call closes its connection, by which the server learns that nobody waits for its
    requests any more.
    """

    def __init__(self, name: str, url: str, keys: Keys, *, config: EngineConfig) -> None:
        self.name = name
        self.url = url.rstrip("/")
        self.config = config
        self._keys = keys
        # by method, route, admin: they are always the same
        self._heads: dict[tuple[str, str, bool], bytes] = {}
        self._connections: Connections | None = None
        self._closed = False

    async def post(
        self, route: str, body: dict[str, Any], *, timeout_s: float, key: str, admin: bool = False
    ) -> Any:
        """The JSON value that the server answers, its text where it does not answer JSON, None
        where it says nothing.

        Args:
            body: JSON-able; numpy arrays are written as lists.
            key: of the configuration, which sets `timeout_s`.
            admin: whether the route controls the server, rather than asking it for something.

        Raises:
            UserError: the request itself is bad: in the server's own words.
            EngineFailed: the server is dead, in trouble, or answers what is no JSON; EngineHangs
                after `timeout_s`.
        """
        return await self._call(
            "POST",
            route,
            orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY),
            timeout_s,
            key,
            admin,
        )

    async def get(self, route: str, *, timeout_s: float, key: str, admin: bool = False) -> Any:
        """As `post`."""
        return await self._call("GET", route, b"", timeout_s, key, admin)

    async def close(self) -> None:
        """Calls in flight fail. May be called twice."""
        self._closed = True
        if self._connections is not None:
            await self._connections.close()

    async def _call(
        self, method: str, route: str, body: bytes, timeout_s: float, key: str, admin: bool
    ) -> Any:
        connections = self._open()
        head = self._heads.get((method, route, admin)) or self._head(
            connections, method, route, admin
        )
        try:
            status, content_type, content = await connections.ask(
                b"%b%d\r\n\r\n" % (head, len(body)), body, timeout_s
            )
        except DeadlinePassed:
            raise EngineHangs(
                f"engine {self.name} did not answer {route} within {timeout_s:g} s ({key})"
            ) from None
        except OSError as error:
            raise EngineFailed(
                f"engine {self.name} at {self.url} broke off {route}: {described(error)}"
            ) from error
        if not 200 <= status < 300:
            raise self._refusal(route, status, content)
        if content_type != "application/json":
            return content.decode(errors="replace") or None
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise EngineFailed(
                f"engine {self.name} answered {route} with no JSON ({error}): {quoted(content)}"
            ) from error

    def _open(self) -> Connections:
        """Made in the event loop that uses them."""
        if self._closed:
            raise EngineFailed(f"engine {self.name}: its client is closed")
        if self._connections is None:
            self._connections = Connections(self.url)
        return self._connections

    def _head(self, connections: Connections, method: str, route: str, admin: bool) -> bytes:
        """All of a request's head up to the length of its body."""
        secret, variable = (self._keys.admin, ADMIN_KEY) if admin else (self._keys.api, API_KEY)
        if not secret.isprintable():
            raise UserError(
                f"{variable} has characters in it that HTTP cannot carry, like the end of a line"
            )
        head = (
            f"{method} {connections.path}{route} HTTP/1.1\r\nHost:"
            f" {connections.authority}\r\nAccept: */*\r\nAuthorization: Bearer"
            f" {secret}\r\nContent-Type: application/json\r\nContent-Length: "
        ).encode()
        self._heads[method, route, admin] = head
        return head

    def _refusal(self, route: str, status: int, content: bytes) -> UserError | EngineFailed:
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


def server_words(content: bytes) -> str:
    """What the server gives as the reason, out of the forms that it has for that."""
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError:
        return quoted(content)
    for name in ("error", "message", "detail"):
        while isinstance(value, dict) and name in value:
            value = value[name]
    return value[:QUOTED] if isinstance(value, str) else quoted(content)


def quoted(content: bytes) -> str:
    text = content[:QUOTED].decode(errors="replace").strip()
    return text or "(nothing said)"


def described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
