"""Asks an HTTP server that somebody else wrote and runs: it may be slow, down, lying or huge."""

from __future__ import annotations

import asyncio
import os
from itertools import count
from typing import Any

import aiohttp
import orjson

from rlcore.config.sections.reward_services import ServerConfig
from rlcore.errors import ConfigError
from rollout.rewards.base import RewardFailure

MAX_ANSWER_BYTES = 4 << 20
FIRST_PAUSE_S = 0.5  # before the second attempt; doubled from one to the next
LONGEST_PAUSE_S = 30.0
TRY_AGAIN = {408, 425, 429}  # of the 4xx: another attempt may succeed
QUOTED = 200  # characters of a server's own words


class NoAnswer(Exception):
    """A server gave no answer that can be used; `failure` says why."""

    def __init__(self, failure: RewardFailure, *, again: bool, pause_s: float = 0.0) -> None:
        super().__init__(failure.reason)
        self.failure = failure
        self.again = again
        self.pause_s = pause_s


class Client:
    """Posts JSON to the servers of a reward part, each request with its deadline and retries.

    Args:
        where: the configuration key of the part, for errors.

    Raises:
        ConfigError: `api_key_env` names a variable that is not set.
    """

    def __init__(self, where: str, config: ServerConfig) -> None:
        self._where = where
        self._config = config
        self._headers = {"Content-Type": "application/json", "User-Agent": "rlcore"}
        if config.api_key_env is not None:
            key = os.environ.get(config.api_key_env)
            if not key:
                raise ConfigError(
                    f"{where}.api_key_env: the variable {config.api_key_env} is not set in the"
                    " environment of the trainer"
                )
            self._headers["Authorization"] = f"Bearer {key}"
        self._turn = count()
        self._slots: asyncio.Semaphore | None = None
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: Any, route: str = "") -> Any:
        """Return the JSON value that a server answers to `body`.

        Raises NoAnswer after the last attempt.
        """
        if self._session is None:
            self._slots = asyncio.Semaphore(self._config.concurrency)
            self._session = aiohttp.ClientSession(
                headers=self._headers, cookie_jar=aiohttp.DummyCookieJar()
            )
        assert self._slots is not None
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY, default=str)
        for attempt in count():
            try:
                async with self._slots:
                    return await self._attempt(data, route)
            except NoAnswer as error:
                if not error.again or attempt >= self._config.retries:
                    raise
                pause_s = max(error.pause_s, FIRST_PAUSE_S * 2.0 ** min(attempt, 10))
            await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))
        raise AssertionError("the attempts have an end")

    async def _attempt(self, data: bytes, route: str) -> Any:
        assert self._session is not None
        urls = self._config.url
        url = urls[next(self._turn) % len(urls)].rstrip("/") + route
        try:
            async with self._session.post(
                url,
                data=data,
                timeout=aiohttp.ClientTimeout(total=self._config.timeout_s),
                allow_redirects=False,
            ) as response:
                content = await _limited(response, url)
        except asyncio.TimeoutError:
            reason = f"{url} gave no answer in {self._config.timeout_s:g} s ({self._where})"
            raise NoAnswer(RewardFailure("timeout", reason), again=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reason = f"{url} cannot be asked: {type(error).__name__}: {error}"
            raise NoAnswer(RewardFailure("error", reason), again=True) from error
        if response.status != 200:
            raise NoAnswer(
                RewardFailure("error", f"{url} answered {response.status}: {_quoted(content)}"),
                again=response.status >= 500 or response.status in TRY_AGAIN,
                pause_s=_retry_after_s(response),
            )
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            reason = f"{url} answered no JSON ({error}): {_quoted(content)}"
            raise NoAnswer(RewardFailure("error", reason), again=False) from error

    async def close(self) -> None:
        """Calls in flight fail. May be called twice."""
        if self._session is not None:
            await self._session.close()


async def _limited(response: aiohttp.ClientResponse, url: str) -> bytes:
    """The body of an answer. Raises NoAnswer where it is longer than `MAX_ANSWER_BYTES`."""
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            response.close()
            reason = f"{url} answered more than {MAX_ANSWER_BYTES >> 20} MiB"
            raise NoAnswer(RewardFailure("error", reason), again=False)
    return bytes(content)


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    """How long the server asks to be left alone; 0 where it does not say so in seconds."""
    said = response.headers.get("Retry-After", "")
    return float(said) if said.isdecimal() else 0.0


def _quoted(content: bytes) -> str:
    text = content[: 4 * QUOTED].decode(errors="replace")
    printable = "".join(c if c.isprintable() else " " for c in text)
    return repr(printable[:QUOTED])
