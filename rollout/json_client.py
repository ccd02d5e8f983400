"""Posts JSON to external servers, which may be slow, down, wrong or send too much."""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, Literal

import aiohttp
import orjson

from rlcore.boundary.http_server import TooLong, read_at_most
from rlcore.config.secrets import mask_text
from rlcore.tls import client_context, refused_certificate

FIRST_PAUSE_S = 0.5  # pause before the second attempt; doubles each time
MAX_PAUSE_S = 30.0
TRY_AGAIN = {408, 425, 429}  # the 4xx statuses after which another attempt may succeed
QUOTED = 200  # characters quoted from a server's own message


class NoAnswer(Exception):
    """A server gave no usable answer.

    Args:
        again: another attempt may succeed.
        pause_s: pause that the server asks for before it.
    """

    def __init__(
        self,
        reason: str,
        *,
        kind: Literal["error", "timeout", "too_long"] = "error",
        again: bool,
        pause_s: float = 0.0,
    ) -> None:
        super().__init__(reason)
        self.kind = kind
        self.again = again
        self.pause_s = pause_s


async def read_answer(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read the body of an answer; beyond `limit` bytes, stop and close the connection.

    aiohttp itself bounds headers (128 of 8 KiB) but no body.

    Raises:
        TooLong: the body, or its announced length, exceeds `limit`.
    """
    try:
        return await read_at_most(response.content, response.content_length, limit)
    except TooLong:
        response.close()
        raise


class JsonClient:
    """Posts JSON with a deadline for each attempt. Use it from one event loop.

    Args:
        urls: servers that are asked in turn.
        where: the configuration key of the servers, for errors.
        timeout_s: deadline of one attempt.
        retries: attempts after the first.
        concurrency: concurrent requests; a request that pauses between attempts does not count.
        answer_bytes: limit of an answer's length.
        ca_file: the accepted certificate authorities; None: the system's.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        where: str,
        timeout_s: float,
        retries: int,
        concurrency: int,
        answer_bytes: int,
        headers: Mapping[str, str] | None = None,
        ca_file: str | None = None,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._where = where
        self._timeout_s = timeout_s
        self._retries = retries
        self._answer_bytes = answer_bytes
        self._headers = {"Content-Type": "application/json", "User-Agent": "rlcore"} | dict(
            headers or {}
        )
        self._ca_file = ca_file
        self._turn = count()
        self._slots = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def post(
        self,
        body: Any,
        route: str = "",
        *,
        timeout_s: float | None = None,
        read: Callable[[Any], Any] = lambda answer: answer,
    ) -> Any:
        """The JSON value that a server answers to `body`, or what `read` makes of it.

        Args:
            timeout_s: deadline of one attempt, instead of the client's.
            read: may raise NoAnswer, if another attempt may bring a better answer.

        Raises:
            NoAnswer: the last attempt failed.
        """
        if self._session is None:
            tls: ssl.SSLContext | Literal[True] = True
            if self._ca_file is not None:
                tls = client_context(self._ca_file, where=f"{self._where}.ca_file")
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                cookie_jar=aiohttp.DummyCookieJar(),
                connector=aiohttp.TCPConnector(ssl=tls),
            )
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY, default=str)
        for attempt in count():
            try:
                async with self._slots:
                    answer = await self._attempt(
                        self._session, data, route, timeout_s or self._timeout_s
                    )
                return read(answer)
            except NoAnswer as error:
                if not error.again or attempt >= self._retries:
                    raise
                pause_s = max(error.pause_s, FIRST_PAUSE_S * 2.0 ** min(attempt, 10))
            # spread the retries on an overloaded server
            await asyncio.sleep(min(pause_s * random.uniform(1.0, 1.5), MAX_PAUSE_S))
        raise AssertionError("the loop returns or raises in its last attempt")

    async def _attempt(
        self, session: aiohttp.ClientSession, data: bytes, route: str, timeout_s: float
    ) -> Any:
        asked = self._urls[next(self._turn) % len(self._urls)] + route
        url = mask_text(asked)
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with session.post(
                asked, data=data, timeout=limit, allow_redirects=False
            ) as response:
                content = await read_answer(response, self._answer_bytes)
        except TooLong as error:
            reason = f"{url} answered more than {self._answer_bytes >> 20} MiB"
            raise NoAnswer(reason, kind="too_long", again=False) from error
        except TimeoutError:
            reason = f"{url} gave no answer in {timeout_s:g} s ({self._where})"
            raise NoAnswer(reason, kind="timeout", again=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            where = f"{self._where}.ca_file"
            if (why := refused_certificate(error, asked, self._ca_file, where=where)) is not None:
                raise NoAnswer(f"{url} cannot be asked: {why}", again=False) from error
            reason = f"{url} cannot be asked: {type(error).__name__}: {mask_text(str(error))}"
            raise NoAnswer(reason, again=True) from error
        if response.status != 200:
            said = response.headers.get("Retry-After", "")
            raise NoAnswer(
                f"{url} answered {response.status}: {_quoted(content)}",
                again=response.status >= 500 or response.status in TRY_AGAIN,
                pause_s=float(said) if said.isdecimal() else 0.0,
            )
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            # for example a proxy's error page
            reason = f"{url} answered no JSON ({error}): {_quoted(content)}"
            raise NoAnswer(reason, again=True) from error

    async def close(self) -> None:
        """Close the client; calls in flight fail. May be called twice."""
        if self._session is not None:
            await self._session.close()


def _quoted(content: bytes) -> str:
    text = content[: 4 * QUOTED].decode(errors="replace")
    printable = "".join(c if c.isprintable() else " " for c in text)
    return repr(printable[:QUOTED])
