"""The local server of the page: loopback alone, a token in every address, reading only."""

from __future__ import annotations

import hmac
import json
import logging
import secrets
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson

from rlcore.errors import DataError
from rlcore.runs import sample_table
from rlcore.view.api import Api

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
IDLE_S = 60.0  # a connection that asks nothing for so long is closed
SCRIPTS = (
    *("dom.js", "data.js", "charts.js", "runs.js", "samples.js", "tokens.js", "sample.js"),
    *("groups.js", "others.js", "timeline.js", "main.js"),
)
STYLE = "style.css"
PAGE = "index.html"
# A page of another site that a name server points here sends its own name.
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
    """Return JSON; what is not finite becomes null."""
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(value, option=options, default=str)
    except TypeError:  # integers beyond 64 bits, and halves of surrogate pairs
        known = json.loads(sample_table.to_json(value), parse_constant=lambda _: None)
        return json.dumps(known).encode()


def static(name: str) -> bytes:
    """Return a file of the page."""
    return files("rlcore.view").joinpath("static", name).read_bytes()


class ViewServer(ThreadingHTTPServer):
    """Serves the page below `/TOKEN/`.

    Args:
        port: 0 for a free one.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, api: Api, *, port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self.api = api
        self.token = secrets.token_urlsafe(24)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that went away; anything else goes to the log."""
        logger.debug("a request ended early", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version = "rlcore"
    sys_version = ""
    timeout = IDLE_S

    def do_GET(self) -> None:
        """Answer with a file of the page or with JSON; without the token with nothing."""
        parts = urlsplit(self.path)
        _, token, *rest = [*parts.path.split("/"), ""]
        if self._host() not in HOSTS:
            self._send(HTTPStatus.FORBIDDEN, b"this host name is not served here\n", "text/plain")
        elif not hmac.compare_digest(token.encode(), self.server.token.encode()):
            message = b"the address lacks the token that rlcore view has printed\n"
            self._send(HTTPStatus.FORBIDDEN, message, "text/plain")
        else:
            self._answer("/".join(rest[:-1]), parts.query)

    def _host(self) -> str:
        given = self.headers.get_all("Host") or []
        name, _, port = given[0].rpartition(":") if len(given) == 1 else ("", "", "")
        return name.lower() if port.isdigit() else given[0].lower() if len(given) == 1 else ""

    def _answer(self, path: str, query: str) -> None:
        if path in ("", *SCRIPTS, STYLE):
            name = path or PAGE
            self._send(HTTPStatus.OK, static(name), _KINDS[name.rpartition(".")[2]])
            return
        kind, _, name = path.partition("/")
        if kind != "api":
            self._send(HTTPStatus.NOT_FOUND, b"there is no such page\n", "text/plain")
            return
        try:
            found = self.server.api.answer(name, parse_qs(query, max_num_fields=2000))
            self._send(HTTPStatus.OK, to_json(found), "application/json")
        except (DataError, ValueError) as error:
            message = to_json({"error": str(error)})
            self._send(HTTPStatus.BAD_REQUEST, message, "application/json")
        except (LookupError, OSError) as error:  # files that were deleted or rewound meanwhile
            message = to_json({"error": f"the run's files have changed: {error!r}; try again"})
            self._send(HTTPStatus.CONFLICT, message, "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: an address holds the token, and a client's text can steer a terminal."""
