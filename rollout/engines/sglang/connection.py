"""One HTTP/1.1 connection: requests one after the other, and whether another may follow.

It is usable again only after an answer that was whole, with nothing behind it, so that no answer
can reach another request's caller.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

JOINED_BYTES = 1 << 16  # a body up to this goes out in one piece with its head
# headers, without which an answer ends with its connection
FRAMING = (b"content-length", b"transfer-encoding")


class BrokenOff(ConnectionError):
    """The connection ended before a whole answer came, or what came is no HTTP."""


class Answer(NamedTuple):
    status: int
    content_type: str  # without parameters, in lower case
    content: bytes


class Connection(asyncio.Protocol):
    """Whoever uses it looks whether it is `usable` before a request and after it, and drops it
    where it is not.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.idle_since = 0.0
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        # of the request whose answer is not whole yet
        self._answered: asyncio.Future[Answer] | None = None
        self._clean = True  # all that was asked is answered, and nothing else came
        self._content_type = b""
        self._content = list[bytes]()
        self._framed = self._until_end = self._keep_alive = False

    @property
    def usable(self) -> bool:
        """Whether it can carry a request."""
        transport = self._transport
        return (
            self._clean
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def exchange(self, head: bytes, body: bytes) -> asyncio.Future[Answer]:
        """Send a request over a usable connection; its answer."""
        assert self._transport is not None
        assert self._answered is None
        self._clean, self._answered = False, self._loop.create_future()
        answered = self._answered
        if len(body) <= JOINED_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return answered

    def fail(self, error: Exception) -> None:
        """The answer will not be whole, or was not the last thing to come."""
        self._clean = False
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)

    def drop(self) -> None:
        self._clean = False
        if self._transport is not None:
            # not `close`, which would wait until the server took what is written
            self._transport.abort()

    # --- of the transport -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answered is None:  # nobody asked
            self.drop()
            return
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self.fail(BrokenOff(f"no HTTP answer: {error}"))

    def eof_received(self) -> None:
        if self._until_end and self._answered is not None:
            self.on_message_complete()

    def connection_lost(self, error: Exception | None) -> None:
        self.fail(error or BrokenOff("the connection was closed before the answer was whole"))

    # --- of the parser ----------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._answered is None:  # behind a whole answer
            self._clean = False
        self._content_type = b""
        self._content = list[bytes]()
        self._framed = self._until_end = self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value
        elif name in FRAMING:
            self._framed = True

    def on_headers_complete(self) -> None:
        self._until_end, self._keep_alive = not self._framed, self._parser.should_keep_alive()

    def on_body(self, part: bytes) -> None:
        self._content.append(part)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        answered = self._answered
        if answered is None or status < 200:  # 1xx: the answer itself is still to come
            return
        self._answered = None
        # else somebody gave the call up: the connection goes with it
        if not answered.done():
            self._clean = self._keep_alive
            kind = self._content_type.partition(b";")[0].strip().lower().decode("latin-1")
            answered.set_result(Answer(status, kind, b"".join(self._content)))
        self._content.clear()
