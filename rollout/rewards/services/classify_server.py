"""Serves a reward model over HTTP, in the format of SGLang's `/classify`.

The HTTP server runs in a thread of its own. Another thread takes batches of texts, of all requests
that wait, and gives their scores back.
"""

from __future__ import annotations

import asyncio
import hmac
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from aiohttp import web
from numpy.typing import NDArray

from rlcore.boundary.http_server import BodyRefused, HttpServer, bound, read_body
from rlcore.deadlines import CLOSE_ENGINES_S, SCORE_S
from rlcore.errors import ConfigError, DataError, DeadlineExceeded
from rollout.asyncio_utils import LoopThread, within

MAX_BODY = 32 << 20
MAX_REQUESTS = 1024  # that are read, wait or are scored
MAX_WAITING_TOKENS = 1 << 24  # 64 MiB; beyond it requests are sent away until some are scored
RETRY_AFTER_S = 1

Tokens = NDArray[np.int32]
Encode = Callable[[Sequence[str]], Sequence[Tokens]]


@dataclass(frozen=True)
class Waiting:
    """A text that waits for its score."""

    tokens: Tokens
    score: asyncio.Future[float]


class Refused(Exception):
    """A request gets no score; `status` is HTTP's."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class ClassifyServer:
    """Takes requests, and hands their texts to one thread that scores them.

    Args:
        encode: makes tokens of texts, in a thread; raises DataError for a text that it cannot read.
        max_tokens: the longest text.
        vocab_size: of the model.
        key: what requests must carry as a bearer token; None: nothing.
    """

    def __init__(
        self, encode: Encode, *, max_tokens: int, vocab_size: int, key: str | None = None
    ) -> None:
        self._encode = encode
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._key = None if key is None else f"Bearer {key}".encode()
        self._texts: deque[Waiting] = deque()
        self._tokens = 0  # of the texts that wait
        self._changed = threading.Condition()
        self._requests = 0
        self._closing = False
        self.scored = 0
        self._loop = LoopThread("reward-model-http")
        self._encoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._runner: web.ServerRunner | None = None

    def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; return the port, which the system chooses for 0.

        Raises:
            ConfigError: the address cannot be had.
        """

        async def listen() -> int:
            # a client that leaves takes its texts along
            server = HttpServer(self._serve, cancel=True)
            try:
                self._runner = await server.listen(bound(host, port), closes_s=1.0, tls=tls)
            except OSError as error:
                raise ConfigError(f"--host {host} --port {port}: cannot listen: {error}") from error
            return int(self._runner.addresses[0][1])

        return self._loop.call(listen(), seconds=CLOSE_ENGINES_S, what="the server's start")

    # --- the thread that scores -------------------------------------------------------------------

    def take(self, max_tokens: int, *, timeout_s: float) -> list[Waiting]:
        """Return the texts that came first, up to so many tokens but at least one text.

        The list is empty if none came within `timeout_s`.
        """
        taken: list[Waiting] = []
        size = 0
        with self._changed:
            self._changed.wait_for(lambda: self._texts, timeout=timeout_s)
            while self._texts and (not taken or size + len(self._texts[0].tokens) <= max_tokens):
                text = self._texts.popleft()
                self._tokens -= len(text.tokens)
                if not text.score.done():  # else its client has left
                    taken.append(text)
                    size += len(text.tokens)
        return taken

    def answer(self, taken: Sequence[Waiting], scores: Sequence[float]) -> None:
        """Give texts their scores."""

        def give() -> None:
            for text, score in zip(taken, scores, strict=True):
                if not text.score.done():
                    text.score.set_result(score)

        self.scored += len(taken)
        self._loop.loop.call_soon_threadsafe(give)

    def close(self) -> None:
        """Refuse what waits and what comes, and stop listening."""
        self._loop.call(self._close(), seconds=CLOSE_ENGINES_S, what="the server's end")
        self._encoder.shutdown(wait=False, cancel_futures=True)
        self._loop.close()

    async def _close(self) -> None:
        self._closing = True
        with self._changed:
            for text in self._texts:
                if not text.score.done():
                    text.score.set_exception(Refused(503, "the server is ending"))
            self._texts.clear()
        if self._runner is not None:
            await self._runner.cleanup()

    # --- the thread of HTTP -----------------------------------------------------------------------

    async def _serve(self, request: web.BaseRequest) -> web.Response:
        if (request.method, request.path) == ("POST", "/classify"):
            return await self._classify(request)
        if (request.method, request.path) == ("GET", "/health"):
            status = 503 if self._closing else 200
            return _reply({"waiting": len(self._texts), "scored": self.scored}, status)
        return _refusal(404, "there are POST /classify and GET /health alone")

    async def _classify(self, request: web.BaseRequest) -> web.Response:
        if self._key is not None:
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, self._key):
                return _refusal(401, "this server wants a key as a bearer token")
        if self._closing or self._requests >= MAX_REQUESTS:
            return _refusal(503, "the server is ending" if self._closing else "too many requests")
        self._requests += 1
        try:
            late = f"no score within {SCORE_S:g} s"
            return await within(SCORE_S, self._scores(request), lambda: late)
        except (Refused, BodyRefused) as refused:
            return _refusal(refused.status, str(refused))
        except DeadlineExceeded as error:
            return _refusal(504, str(error))
        finally:
            self._requests -= 1

    async def _scores(self, request: web.BaseRequest) -> web.Response:
        given, single = _read(await read_body(request, MAX_BODY))
        encoded: Sequence[Tokens] = given
        if isinstance(given[0], str):
            loop = asyncio.get_running_loop()
            try:
                encoded = await loop.run_in_executor(self._encoder, self._encode, given)
            except DataError as error:
                raise Refused(400, str(error)) from error
        waiting = self._enqueue(encoded)
        try:
            scores = await asyncio.gather(*(text.score for text in waiting))
        finally:
            for text in waiting:
                text.score.cancel()
        rows = [
            # a score that is not finite becomes null, which clients count as a failure
            {"embedding": [score], "meta_info": {"prompt_tokens": len(text.tokens)}}
            for text, score in zip(waiting, scores)
        ]
        return _reply(rows[0] if single else rows)

    def _enqueue(self, encoded: Iterable[Tokens]) -> list[Waiting]:
        loop = asyncio.get_running_loop()
        waiting = []
        for number, tokens in enumerate(encoded, 1):
            if not 0 < len(tokens) <= self._max_tokens:
                raise Refused(
                    400,
                    f"text {number} has {len(tokens)} tokens, expected 1 to {self._max_tokens}"
                    " (the server's policy.max_tokens_per_microbatch, or the model's context)",
                )
            if tokens.min() < 0 or tokens.max() >= self._vocab_size:
                raise Refused(
                    400,
                    f"text {number} has tokens from {tokens.min()} to {tokens.max()}, the model"
                    f" knows 0 to {self._vocab_size - 1}",
                )
            waiting.append(Waiting(tokens, loop.create_future()))
        size = sum(len(text.tokens) for text in waiting)
        with self._changed:
            # a request that finds the queue empty is taken, whatever its size
            if self._texts and self._tokens + size > MAX_WAITING_TOKENS:
                raise Refused(503, f"{self._tokens} tokens wait to be scored already")
            self._texts.extend(waiting)
            self._tokens += size
            self._changed.notify()
        return waiting


def _read(body: bytes) -> tuple[list[Any], bool]:
    """Read the texts, or tokens, of a request, and whether it is one without a list.

    Raises Refused.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"the body is no JSON: {error}") from error
    given = content.get("text", content.get("input_ids")) if isinstance(content, dict) else None
    if isinstance(given, str):
        return [given], True
    if not isinstance(given, list) or not given:
        raise Refused(400, 'expected {"text": [TEXT, ...]} or {"input_ids": [[TOKEN, ...], ...]}')
    if all(isinstance(text, str) for text in given):
        return given, False
    single = not isinstance(given[0], list)
    rows = [given] if single else given
    if not all(isinstance(row, list) and all(type(i) is int for i in row) for row in rows):
        raise Refused(400, "expected texts alone, or token ids alone")
    try:
        return [np.array(row, dtype=np.int32) for row in rows], single
    except OverflowError as error:
        raise Refused(400, f"input_ids: {error}") from error


def _reply(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def _refusal(status: int, reason: str) -> web.Response:
    answer = _reply({"error": {"message": reason}}, status)
    if status == 503:
        answer.headers["Retry-After"] = str(RETRY_AFTER_S)
    return answer
