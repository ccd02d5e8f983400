"""The HTTP server for agent programs: one server for a workflow, one key for a rollout."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aiohttp import web

from rlcore.boundary.http_server import BodyRefused, HttpServer, bound, read_body
from rlcore.config.sections.rollout import TRAINED
from rlcore.deadlines import GATEWAY_CLOSES_S, GATEWAY_STARTS_S
from rlcore.errors import RunFailed
from rollout.asyncio_utils import within
from rollout.conversation.conversation import Conversation
from rollout.gateway.sessions import OVER, Session
from rollout.gateway.wire import JSON, Refused, answer_body, model_list, read_request

BODY_BYTES = 64 << 20  # limit of a request's body
ATTEMPT_DIGITS = 4  # limit of digits in a client's attempt number
SCHEME = "Bearer "
MODELS = "/v1/models"
METHODS = {"/v1/chat/completions": "POST", MODELS: "GET"}
NO_RETRY = {"x-should-retry": "false"}  # a repeated request would fail again


@dataclass(frozen=True)
class Endpoint:
    """Address, key and model name for an agent program."""

    base_url: str
    api_key: str
    model: str


class Gateway:
    """Serves chat completions on loopback, from the event loop that opens the first session.

    The server ends with the loop's tasks. A later loop gets a new server.

    Args:
        decode: returns the text of a token, for log-probs.
    """

    def __init__(self, decode: Callable[[int], str]) -> None:
        self._decode = decode
        self._sessions: dict[str, Session] = {}
        # prefix of all keys, by which keys of closed sessions are recognized
        self._prefix = f"rlcore-{secrets.token_hex(8)}-"
        self._created = int(time.time())
        self._serving: asyncio.Task[None] | None = None
        self._port: asyncio.Future[int] | None = None

    async def open(self, conversation: Conversation) -> tuple[Session, Endpoint]:
        """Begin the session of a rollout. Raises RunFailed if the server cannot be started."""
        if self._serving is None or self._serving.done():
            self._port = asyncio.get_running_loop().create_future()
            self._serving = asyncio.ensure_future(self._serve(self._port))
        assert self._port is not None
        port = await within(
            GATEWAY_STARTS_S, asyncio.shield(self._port), lambda: "the gateway does not start"
        )
        session = Session(conversation, self._prefix + secrets.token_hex(16))
        self._sessions[session.key] = session
        return session, Endpoint(f"http://127.0.0.1:{port}/v1", session.key, TRAINED)

    async def close(self, session: Session, *, drain: bool) -> None:
        """End a session and refuse its key from now on. See `Session.close`."""
        self._sessions.pop(session.key, None)
        await session.close(drain=drain)

    async def _serve(self, port: asyncio.Future[int]) -> None:
        """Serve until the task is cancelled."""
        # a plain handler: routes and middlewares cost more than the bookkeeping of a call
        server = HttpServer(self._handle, cancel=True)
        try:
            runner = await server.listen(bound("127.0.0.1"), closes_s=GATEWAY_CLOSES_S)
        except OSError as error:
            port.set_exception(RunFailed(f"the gateway of agent programs cannot start: {error}"))
            return
        port.set_result(runner.addresses[0][1])
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            body, kind = await self._answer(request)
        except Refused as refused:
            return web.Response(
                status=refused.status, body=refused.body(), content_type=JSON, headers=NO_RETRY
            )
        return web.Response(body=body, content_type=kind)

    async def _answer(self, request: web.BaseRequest) -> tuple[bytes, str]:
        """The body of the answer and its content type."""
        session = self._session(request.headers)
        path = request.path
        one = path.removeprefix(f"{MODELS}/")
        if one in session.models:
            path = MODELS
        if path not in METHODS:
            raise Refused(
                404,
                f"there is no {path} here, only /v1/chat/completions and /v1/models",
                code="unknown_url",
            )
        if request.method != METHODS[path]:
            raise Refused(405, f"{path} takes {METHODS[path]}, got {request.method}")
        if request.method == "GET":
            known = one if one in session.models else None
            return model_list(self._created, session.models, known), JSON
        try:
            body = await read_body(request, BODY_BYTES)
        except BodyRefused as refused:
            raise Refused(refused.status, str(refused)) from refused
        asked = read_request(body, models=session.models, held=session.held)
        answer = await session.answer(body, asked, _attempt(request.headers))
        return answer_body(answer, asked, self._decode)

    def _session(self, headers: Mapping[str, str]) -> Session:
        key = headers.get("Authorization", "").removeprefix(SCHEME)
        session = self._sessions.get(key)
        if session is not None:
            return session
        if key.startswith(self._prefix):
            raise Refused(410, OVER, code="rollout_over")
        raise Refused(
            401,
            "there is no rollout with this API key; give the client the endpoint's key",
            code="invalid_api_key",
        )


def _attempt(headers: Mapping[str, str]) -> int:
    """The number of earlier attempts that the client reports."""
    said = headers.get("x-stainless-retry-count", "")
    return int(said) if said.isdecimal() and len(said) <= ATTEMPT_DIGITS else 0
