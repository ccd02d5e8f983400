"""Kept-alive HTTP/1.1 connections to one server, with a deadline for every call. Nothing is sent
twice.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from urllib.parse import urlsplit

from rollout.engines.sglang.connection import Answer, BrokenOff, Connection

# Below the 5 s after which SGLang closes an idle connection: a request must never be written into
# one that just closes.
KEEP_ALIVE_S = 3.0


class DeadlinePassed(Exception):
    """A call took too long."""


class Connections:
    """To the server at `url` (http or https), as many as there are calls. For one event loop."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.path = parts.path.rstrip("/")
        self.authority = parts.netloc.rpartition("@")[2]
        self._host = parts.hostname or ""
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._loop = asyncio.get_running_loop()
        self._open: set[Connection] = set()
        self._idle: deque[Connection] = deque()  # of them; the one that idles longest first
        self._connecting: set[asyncio.Task[object]] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._closed = False

    async def ask(self, head: bytes, body: bytes, timeout_s: float) -> Answer:
        """The server's answer to one request. A call that is cancelled closes its connection.

        Raises:
            DeadlinePassed: after `timeout_s` for connecting, sending and the whole answer.
            OSError: there is no connection to be had, or it ended early (BrokenOff).
        """
        deadline = self._loop.time() + timeout_s
        connection = self._take()
        try:
            if not connection.usable:
                await self._connect(connection, deadline)
            alarm = self._loop.call_at(deadline, connection.fail, DeadlinePassed())
            try:
                return await connection.exchange(head, body)
            finally:
                alarm.cancel()
        finally:
            self._give_back(connection)

    async def close(self) -> None:
        """Calls in flight raise BrokenOff. May be called twice."""
        self._closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        for task in self._connecting:
            task.cancel()
        for connection in self._open:
            connection.drop()
        self._idle.clear()
        await asyncio.sleep(0)  # sockets close at the loop's next turn

    def _take(self) -> Connection:
        """The one that was used last, so that those which are not needed come of age; else one to
        connect.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and self._loop.time() - connection.idle_since < KEEP_ALIVE_S:
                return connection
            self._drop(connection)
        connection = Connection(self._loop)
        self._open.add(connection)
        return connection

    def _give_back(self, connection: Connection) -> None:
        if self._closed or not connection.usable:
            self._drop(connection)
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(KEEP_ALIVE_S, self._drop_old)

    def _drop_old(self) -> None:
        self._sweep = None
        oldest = self._loop.time() - KEEP_ALIVE_S
        while self._idle and self._idle[0].idle_since <= oldest:
            self._drop(self._idle.popleft())
        if self._idle:
            self._sweep = self._loop.call_later(self._idle[0].idle_since - oldest, self._drop_old)

    def _drop(self, connection: Connection) -> None:
        self._open.discard(connection)
        connection.drop()

    async def _connect(self, connection: Connection, deadline: float) -> None:
        making: asyncio.Task[object] = self._loop.create_task(
            self._loop.create_connection(lambda: connection, self._host, self._port, ssl=self._tls)
        )
        self._connecting.add(making)
        try:
            # Not asyncio.wait_for, which up to Python 3.11 may lose the cancellation of our caller.
            await asyncio.wait({making}, timeout=deadline - self._loop.time())
            if self._closed:
                raise BrokenOff("the client was closed")
            if not making.done():
                raise DeadlinePassed
            making.result()
            if not connection.usable:
                raise BrokenOff("the connection was closed as soon as it was made")
        except UnicodeError as error:
            raise BrokenOff(f"{self._host!r} is no host's name") from error
        finally:
            self._connecting.discard(making)
            # it closes what it may just have connected: nobody must take that
            if making.cancel():
                connection.drop()
