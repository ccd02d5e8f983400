"""HTTP: servers that answer broken bytes to our clients, clients that send them to our servers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import EngineFailed, UserError
from rollout.asyncio_utils import LoopThread
from rollout.engines.embedded.client import RemoteEngine
from rollout.engines.factories import Keys
from rollout.engines.server_client import ServerClient
from rollout.gateway.server import Gateway
from rollout.json_client import JsonClient, NoAnswer
from tests.fuzz.engine_answers import Known
from tests.fuzz.harness import ACCEPTED, Case, Target
from tests.fuzz.mutation import Mutator
from tests.fuzz.oracle import need
from tests.unit.rollout.conversation.kit import ScriptedModel, make_context, make_tokenizer
from tests.unit.rollout.gateway.agents import TOOLS, USER, make_task

WAIT_S = 60.0
PATIENCE_S = 0.2  # with a server that waits for the rest of a broken request
ENDLESS = 0.01  # of the answers never end
ENDLESS_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n["
Client = Callable[[str], Awaitable[Any]]


@asynccontextmanager
async def raw_server(answer: Callable[[], bytes | None]) -> AsyncIterator[str]:
    """Answer every request with `answer()`, then hang up; None: bytes without an end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            said = answer()
            writer.write(ENDLESS_HEAD if said is None else said)
            while said is None:
                writer.write(b"0," * (1 << 19))
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def ask_sglang(url: str) -> Any:
    """Ask as the SGLang client does."""
    config = EngineConfig(kind="sglang", update_timeout_s=WAIT_S / 2)
    client = ServerClient("engine-3", url, Keys("a", "b"), config=config)
    try:
        return await client.post("/abort_request", {"rid": "x"}, answer_bytes=1 << 22)
    finally:
        await client.close()


async def ask_embedded(url: str) -> Any:
    """Ask as the client of an embedded engine's process does."""
    config = EngineConfig(update_timeout_s=WAIT_S / 2)
    engine = RemoteEngine(Listening(url), config=config, key="the-key")
    try:
        await engine.start()
    finally:
        await engine._hang_up()


class Listening(Known):
    """A server's process that has started."""

    pid = 1

    def __init__(self, url: str) -> None:
        self.url = url
        self.ended: Any = asyncio.get_running_loop().create_future()

    async def start(self) -> str:
        """Return where it listens."""
        return self.url

    async def compiles(self) -> bool:
        return False

    def describe_end(self) -> str:
        """It does not end."""
        return "running"


async def ask_service(url: str) -> Any:
    """Ask as reward services and judges are asked."""
    client = JsonClient(
        [url], where="fuzz", timeout_s=WAIT_S / 2, retries=0, concurrency=1, answer_bytes=1 << 22
    )
    try:
        return await client.post({"a": 1})
    finally:
        await client.close()


CLIENTS: dict[str, Client] = {
    "sglang": ask_sglang, "embedded": ask_embedded, "service": ask_service
}  # fmt: skip
HEALTH = {"result": {"name": "engine-3", "pid": 1, "device": "cpu", "gpu": None, "version": 1}}


@contextmanager
def open_clients() -> Iterator[Case]:
    """Our three HTTP clients, against a server that writes broken bytes."""
    loop = asyncio.new_event_loop()
    said: list[bytes | None] = [b""]

    def head(mutator: Mutator, body: bytes) -> bytes:
        lines = [b"HTTP/1.1 200 OK", b"Content-Type: application/json"]
        if mutator.random.random() < 0.3:
            lines.append(b"Transfer-Encoding: chunked")
            body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        else:
            lines.append(b"Content-Length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    async def ask(name: str) -> Any:
        async with raw_server(lambda: said[0]) as url:
            return await CLIENTS[name](url)

    def case(mutator: Mutator) -> str:
        name = mutator.random.choice([*CLIENTS])
        if mutator.random.random() < 0.3:
            said[0] = head(mutator, mutator.document(HEALTH))
        else:
            said[0] = mutator.bytes(head(mutator, json.dumps(HEALTH).encode()))
        if mutator.changed and mutator.random.random() < ENDLESS:
            said[0] = None
        try:
            loop.run_until_complete(asyncio.wait_for(ask(name), WAIT_S))
        except (EngineFailed, UserError, NoAnswer) as error:
            return f"{name}: {type(error).__name__}"
        need(said[0] is not None, "an answer without an end was accepted")
        return ACCEPTED

    yield case
    loop.close()


# --- our servers ----------------------------------------------------------------------------------


async def exchange(port: int, sent: bytes, *, whole: bool) -> bytes:
    """Send bytes. Return the first line of the answer, b"" if there is none.

    Args:
        whole: the request is valid. A server rightly waits for the rest of some others: we hang up.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        line = asyncio.ensure_future(reader.readline())
        await asyncio.wait({line}, timeout=WAIT_S if whole else PATIENCE_S)
        if not line.done():
            writer.write_eof()
        return await asyncio.wait_for(line, WAIT_S)
    except ConnectionError:
        return b""
    finally:
        writer.close()


def request_bytes(path: str, key: str, body: bytes) -> bytes:
    """Return a whole request."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def check_answered(line: bytes, mutator: Mutator) -> str:
    """A request is answered with success or blame, or the connection ends."""
    words = line.split()
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    need(status < 500, f"the server answered {line!r}")
    if not mutator.changed:
        need(status == 200, f"a valid request was answered {line!r}")
    return ACCEPTED if 200 <= status < 300 else f"{status}" if status else "no answer"


def broken_request(mutator: Mutator, path: str, key: str, body: Any) -> bytes:
    """Return a request with a broken body, or with broken bytes anywhere."""
    if mutator.random.random() < 0.6:
        return request_bytes(path, key, mutator.document(body))
    return mutator.bytes(request_bytes(path, key, json.dumps(body).encode()))


@contextmanager
def open_gateway() -> Iterator[Case]:
    """The gateway of agent programs; each case is a rollout of its own."""
    tokenizer = make_tokenizer()
    prompt = make_task(tokenizer)
    context = make_context(tokenizer)
    gateway = Gateway(lambda token: str(tokenizer.decode([token])))
    thread = LoopThread("fuzz")
    body = {
        "model": "policy", "messages": [USER], "tools": TOOLS, "logprobs": True,
        "max_tokens": 20, "stop": ["x"], "stream": False, "return_token_ids": True,
    }  # fmt: skip

    async def rollout(mutator: Mutator) -> bytes:
        model = ScriptedModel(tokenizer, lambda text, request: "three")
        session, endpoint = await gateway.open(context.conversation(prompt, 4, 0, model))
        try:
            port = int(endpoint.base_url.split(":")[2].split("/")[0])
            sent = broken_request(mutator, "/v1/chat/completions", endpoint.api_key, body)
            line = await exchange(port, sent, whole=not mutator.changed)
            need(not session.failed.done(), "a request made the rollout fail")
            return line
        finally:
            await gateway.close(session, drain=False)

    def case(mutator: Mutator) -> str:
        line: bytes = thread.call(rollout(mutator), seconds=2 * WAIT_S, what="a case")
        return check_answered(line, mutator)

    yield case
    thread.close()


TARGETS = (Target("http-clients", open_clients), Target("gateway", open_gateway))
