"""The local server of the page: loopback only, a token in every address, read-only."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
from aiohttp import web

from rlcore.boundary.http_server import HttpServer, bound
from rlcore.errors import DataError
from rlcore.runs import rollouts
from rlcore.view.api import Api

HOST = "127.0.0.1"
SCRIPTS = (
    *("dom.js", "data.js", "charts.js", "runs.js", "samples.js", "tokens.js", "sample.js"),
    *("groups.js", "others.js", "timeline.js", "main.js"),
)
STYLE = "style.css"
PAGE = "index.html"
# A foreign site whose name resolves to this machine (DNS rebinding) sends its own name.
HOSTS = ("127.0.0.1", "localhost", "[::1]")
_KINDS = {"js": "text/javascript", "css": "text/css", "html": "text/html"}
POLICY = (
    "default-src 'none'; {sources}; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY.format(
        sources="script-src 'self'; style-src 'self'; connect-src 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


def to_json(value: Any) -> bytes:
    """Return JSON, with null for numbers that are not finite."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, option=options, default=str)
    except TypeError:
        # orjson rejects integers beyond 64 bits and halves of surrogate pairs.
        known = json.loads(rollouts.to_json(value), parse_constant=lambda _: None)
        return json.dumps(known).encode()


def static(name: str) -> bytes:
    """Return a file of the page."""
    return files("rlcore.view").joinpath("static", name).read_bytes()


class ViewServer:
    """Serves the page below `/TOKEN/`.

    Args:
        port: 0 for a free one.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, api: Api, *, port: int = 0) -> None:
        self.api = api
        self._listener = bound(HOST, port)
        self._loop = asyncio.new_event_loop()
        self._end = asyncio.Event()
        self.address: tuple[str, int] = self._listener.getsockname()
        self.token = secrets.token_urlsafe(24)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self.address[1]

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def serve(self) -> None:
        """Answer requests until `stop`, or an exception in a signal handler."""
        runner = self._loop.run_until_complete(self._listen())
        try:
            self._loop.run_until_complete(self._end.wait())
        finally:
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

    async def _listen(self) -> web.ServerRunner:
        return await HttpServer(self._answer).listen(self._listener, closes_s=0.0)

    def stop(self) -> None:
        """End `serve`, from another thread."""
        self._loop.call_soon_threadsafe(self._end.set)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        """Answer with a file of the page or with JSON; reject requests without the token."""
        parts = urlsplit(request.path_qs)
        _, token, *rest = [*parts.path.split("/"), ""]
        path = "/".join(rest[:-1])
        kind, _, name = path.partition("/")
        content_type = "text/plain"
        if request.method != "GET":
            status = HTTPStatus.NOT_IMPLEMENTED
            content = b"this server only reads\n"
        elif _host(request) not in HOSTS:
            status = HTTPStatus.FORBIDDEN
            content = b"this host name is not served here\n"
        elif not hmac.compare_digest(token.encode(), self.token.encode()):
            status = HTTPStatus.FORBIDDEN
            content = b"the address lacks the token that rlcore view has printed\n"
        elif path in ("", *SCRIPTS, STYLE):
            name = path or PAGE
            status = HTTPStatus.OK
            content = static(name)
            content_type = _KINDS[name.rpartition(".")[2]]
        elif kind == "api":
            content_type = "application/json"
            status, content = await asyncio.to_thread(self._found, name, parts.query)
        else:
            status = HTTPStatus.NOT_FOUND
            content = b"there is no such page\n"
        headers = {**HEADERS, "Content-Type": f"{content_type}; charset=utf-8"}
        return web.Response(status=status, body=content, headers=headers)

    def _found(self, name: str, query: str) -> tuple[HTTPStatus, bytes]:
        try:
            return HTTPStatus.OK, to_json(
                self.api.answer(name, parse_qs(query, max_num_fields=2000))
            )
        except (DataError, ValueError) as error:
            return HTTPStatus.BAD_REQUEST, to_json({"error": str(error)})
        except (LookupError, OSError) as error:
            # Files were deleted or rewound meanwhile.
            message = f"the run's files have changed: {error!r}; try again"
            return HTTPStatus.CONFLICT, to_json({"error": message})


def _host(request: web.BaseRequest) -> str:
    given = request.headers.getall("Host", [])
    if len(given) != 1:
        return ""
    name, _, port = given[0].rpartition(":")
    return (name if port.isdigit() else given[0]).lower()
