"""The HTTP server of rlcore, which silent clients and huge requests cannot exhaust."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from rlcore.deadlines import FIRST_REQUEST_S, SILENT_BODY_S

BACKLOG = 4096  # pending connections in the kernel's queue
ACCEPTED_AT_ONCE = 16  # connections accepted in one turn of the loop
UNAUTHORISED = {401, 403}
Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

logger = logging.getLogger("rollout.http")
logger.addFilter(
    # The client already got a 400. Strangers who reach the port must not fill the log with
    # tracebacks.
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))
)


class BodyRefused(Exception):
    """The body of a request is refused with the HTTP status `status`."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class TooLong(Exception):
    """A body is longer than its reader accepts."""


def bound(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on the address; port 0 picks a free port.

    Raises:
        OSError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


class HttpServer(web.Server):
    """An aiohttp server that closes connections without a request.

    The server closes a connection whose first request does not arrive within FIRST_REQUEST_S, and
    each connection that it answered with a status of UNAUTHORISED. Connections use at most half of
    the files that the process may open. A new connection beyond that replaces the oldest one
    without a request, or else the one that has been idle longest; if all are busy, the new
    connection is closed.

    Args:
        cancel: cancel a request when its client disconnects.
    """

    def __init__(self, handle: Handle, *, cancel: bool = False) -> None:
        super().__init__(
            self._counted,
            handler_cancellation=cancel,
            access_log=None,
            logger=logger,
            # A small compressed request must not expand into a large one.
            auto_decompress=False,
        )
        self._handle = handle
        # Idle connections, the longest idle first. Those before their first request have a timer.
        self._idle: dict[RequestHandler, asyncio.TimerHandle | None] = {}
        self._max_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Close a surplus connection, and start the timer for the first request."""
        super().connection_made(handler, transport)
        if len(self._connections) > self._max_connections:
            new = (idle for idle, timer in self._idle.items() if timer is not None)
            surplus = next(new, next(iter(self._idle), handler))
            self._busy(surplus)
            surplus.force_close()
            if surplus is handler:
                return
        loop = asyncio.get_running_loop()
        self._idle[handler] = loop.call_later(FIRST_REQUEST_S, handler.force_close)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        self._busy(handler)
        super().connection_lost(handler, exc)

    async def listen(
        self, listener: socket.socket, *, closes_s: float, tls: ssl.SSLContext | None = None
    ) -> web.ServerRunner:
        """Serve until `cleanup` of the returned runner; its `addresses` hold the port.

        Args:
            listener: a socket from `bound`; `cleanup` closes it.
            closes_s: seconds that `cleanup` leaves to open requests.
        """
        runner = web.ServerRunner(self, shutdown_timeout=closes_s)
        await runner.setup()
        await web.SockSite(runner, listener, ssl_context=tls, backlog=ACCEPTED_AT_ONCE).start()
        # This sets the kernel's queue. The backlog above is how many the loop accepts at once.
        listener.listen(BACKLOG)
        return runner

    async def _counted(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = request.protocol
        self._busy(handler)
        try:
            response = await self._handle(request)
        finally:
            if handler in self._connections:
                self._idle[handler] = None
        if response.status in UNAUTHORISED:
            response.force_close()
        return response

    def _busy(self, handler: RequestHandler) -> None:
        timer = self._idle.pop(handler, None)
        if timer is not None:
            timer.cancel()


async def read_body(request: web.BaseRequest, limit: int) -> bytes:
    """Return the body of a request, counting bytes while reading.

    Raises:
        BodyRefused: the body is longer than `limit`, compressed, or does not arrive.
    """
    if "Content-Encoding" in request.headers:
        raise BodyRefused(415, "the body is compressed; expected no Content-Encoding")
    try:
        return await read_at_most(
            request.content, request.content_length, limit, silent_s=SILENT_BODY_S
        )
    except TooLong as error:
        raise BodyRefused(413, f"the request has {error}") from error
    except TimeoutError as error:
        raise BodyRefused(408, f"no byte of the body came in {SILENT_BODY_S:g} s") from error


async def read_at_most(
    content: StreamReader, stated: int | None, limit: int, *, silent_s: float | None = None
) -> bytes:
    """Read a body to its end, or until it is too long.

    Args:
        stated: the length that the sender states, if any.
        silent_s: the longest wait for the next bytes.

    Raises:
        TooLong: the body has more than `limit` bytes.
        TimeoutError: no bytes arrived within `silent_s`.
    """
    size = stated or 0
    chunks: list[bytes] = []
    if size <= limit:
        size = 0
        while size <= limit:
            # Most bodies have arrived completely by now, and need no timer.
            async with nullcontext() if content.is_eof() else asyncio.timeout(silent_s):
                chunk = await content.readany()
            if not chunk:
                return b"".join(chunks)
            size += len(chunk)
            chunks.append(chunk)
    raise TooLong(f"more than {limit:,} bytes")
