"""No HTTP server of ours can be filled by clients that are huge, compressed, slow or silent."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

import rlcore
from rlcore.boundary import http_server
from rlcore.boundary.http_server import HttpServer, bound
from rlcore.view.api import Api
from rlcore.view.server import ViewServer
from rollout.engines.embedded import server as embedded
from rollout.engines.embedded.server import EngineServer
from rollout.gateway import server as gateway_server
from rollout.gateway.server import Gateway

MIB = 1 << 20
LIMIT = MIB
ROOT = Path(rlcore.__file__).parents[1]


class Door(NamedTuple):
    """A server that listens, and a request which it answers after its body is read."""

    port: int
    path: str
    key: str


class Engine:
    """An engine with one verb."""

    name = "engine"
    version = 1

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@asynccontextmanager
async def gateway() -> AsyncIterator[Door]:
    made = Gateway(str)
    made._port = asyncio.get_running_loop().create_future()
    made._serving = asyncio.ensure_future(made._serve(made._port))
    made._sessions["the-key"] = SimpleNamespace(held={}, models={"policy": None})  # type: ignore[assignment]
    yield Door(await made._port, "/v1/chat/completions", "the-key")
    made._serving.cancel()
    await asyncio.wait({made._serving})


@asynccontextmanager
async def engine() -> AsyncIterator[Door]:
    server = EngineServer(Engine(), "the-key")  # type: ignore[arg-type]
    runner = await HttpServer(server.serve).listen(bound("127.0.0.1"), closes_s=0.1)
    yield Door(runner.addresses[0][1], "/received_digest", "the-key")
    await runner.cleanup()


@asynccontextmanager
async def view() -> AsyncIterator[Door]:
    server = await asyncio.to_thread(ViewServer, Api([], follow=False))
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield Door(server.port, f"/{server.token}/api/runs", "")
    server.stop()
    await asyncio.to_thread(thread.join)


DOORS: dict[str, Callable[[], AbstractAsyncContextManager[Door]]] = {
    "gateway": gateway,
    "engine": engine,
    "view": view,
}
WITH_BODIES = ("gateway", "engine")


def knock(name: str, visit: Callable[[Door], Awaitable[Any]]) -> Any:
    """Open a server, and return what its visitor found."""

    async def main() -> Any:
        async with DOORS[name]() as door:
            return await visit(door)

    return asyncio.run(asyncio.wait_for(main(), 60))


async def status(door: Door, headers: str, body: list[bytes], *, method: str = "POST") -> int:
    """Send a request piece by piece, as far as the server takes it; return the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
    head = f"{method} {door.path} HTTP/1.1\r\nHost: 127.0.0.1:1\r\n"
    writer.write(f"{head}Authorization: Bearer {door.key}\r\n{headers}\r\n".encode())
    answer = asyncio.ensure_future(reader.readline())
    try:
        for piece in body:
            if answer.done():
                break
            writer.write(piece)
            await writer.drain()
        return int((await answer).split()[1])
    finally:
        answer.cancel()
        writer.transport.abort()


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_server, "BODY_BYTES", LIMIT)
    monkeypatch.setattr(embedded, "MAX_BODY", LIMIT)


def test_every_server_goes_through_the_one_helper() -> None:
    """No other file makes a server of aiohttp, asyncio or the standard library."""
    makers = ("web.Application(", "AppRunner(", "ServerRunner(", "TCPSite(", "HTTPServer(")
    makers += ("asyncio.start_server(", "web.Server(")
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("rlcore", "rollout", "backends")
        for path in (ROOT / folder).rglob("*.py")
        if any(maker in path.read_text() for maker in makers)
    }
    assert found == {"rlcore/boundary/http_server.py"}


@pytest.mark.parametrize("name", WITH_BODIES)
def test_a_body_is_counted_whether_or_not_its_length_is_stated(name: str) -> None:
    piece = b"x" * (64 << 10)
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece)

    async def visit(door: Door) -> list[int]:
        tracemalloc.start()
        try:
            found = [await status(door, "Transfer-Encoding: chunked\r\n", [chunk] * 1024)]
            found.append(await status(door, f"Content-Length: {2 * LIMIT}\r\n", [piece]))
            assert tracemalloc.get_traced_memory()[1] < 16 * MIB
        finally:
            tracemalloc.stop()
        fits = [b"5\r\n[1 2]\r\n", b"0\r\n\r\n"]
        found.append(await status(door, "Transfer-Encoding: chunked\r\n", fits))
        return found

    assert knock(name, visit) == [413, 413, 400]


@pytest.mark.parametrize("name", WITH_BODIES)
@pytest.mark.parametrize("encoding", ["deflate", "gzip", "br", "zstd", "identity, deflate"])
def test_a_compressed_body_is_not_unpacked(name: str, encoding: str) -> None:
    body = zlib.compress(b" " * (32 * MIB))

    async def visit(door: Door) -> int:
        tracemalloc.start()
        try:
            headers = f"Content-Encoding: {encoding}\r\nContent-Length: {len(body)}\r\n"
            found = await status(door, headers, [body])
            assert tracemalloc.get_traced_memory()[1] < 4 * MIB
            return found
        finally:
            tracemalloc.stop()

    assert knock(name, visit) == 415


@pytest.mark.parametrize(("said", "attempt"), [("2", 2), ("9" * 5000, 0), ("²", 0), ("", 0)])
def test_the_number_of_an_attempt_has_a_size(said: str, attempt: int) -> None:
    assert gateway_server._attempt({"x-stainless-retry-count": said}) == attempt


@pytest.mark.parametrize("name", WITH_BODIES)
def test_a_body_that_stops_coming_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SILENT_BODY_S", 0.2)

    async def visit(door: Door) -> int:
        return await status(door, "Content-Length: 100\r\n", [b"[1"])

    assert knock(name, visit) == 408


@pytest.mark.parametrize("name", DOORS)
def test_a_connection_without_a_request_is_closed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "FIRST_REQUEST_S", 0.3)

    async def visit(door: Door) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", door.port) for _ in range(8)]
        for _, writer in silent[4:]:
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nX: ")
        assert [await reader.read() for reader, _ in silent] == [b""] * 8
        for _, writer in silent:
            writer.close()

    knock(name, visit)


@pytest.mark.parametrize("name", DOORS)
def test_a_refused_key_closes_the_connection(name: str) -> None:
    async def visit(door: Door) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        method = "GET" if name == "view" else "POST"
        path = "/no/api/runs" if name == "view" else door.path
        head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:1\r\nContent-Length: 0\r\n\r\n"
        writer.write(head.encode())
        answer = await reader.read()
        writer.close()
        return answer

    assert knock(name, visit).split()[1] in (b"401", b"403")


@pytest.mark.parametrize("name", DOORS)
def test_silent_clients_cannot_take_the_files_of_the_process(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond half of the files the oldest silent connection makes room for the next client."""
    most = 30
    real = resource.getrlimit
    monkeypatch.setattr(resource, "getrlimit", lambda which: (2 * most, real(which)[1]))
    method = "GET" if name == "view" else "POST"

    async def visit(door: Door) -> tuple[int, int]:
        silent = []
        for _ in range(4 * most):
            connection = socket.create_connection(("127.0.0.1", door.port))
            connection.setblocking(False)
            silent.append(connection)
        answered = await status(door, "Content-Length: 2\r\n", [b"[]"], method=method)
        alive = sum(_is_open(connection) for connection in silent)
        for connection in silent:
            connection.close()
        return answered, alive

    answered, alive = knock(name, visit)
    assert answered in (200, 400)
    assert alive <= most
    assert "out of system resource" not in caplog.text


def _is_open(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionError:
        return False
