"""A server that speaks HTTP byte by byte, and the client against it."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from patient_loop import run_steadily

from rlcore.config.sections.rollout import EngineConfig
from rollout.engines.factories import Keys
from rollout.engines.server_client import ServerClient


def answer(content: bytes, *, head: bytes = b"", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: text/plain\r\n%bContent-Length: %d\r\n\r\n%b" % (
        status,
        head,
        len(content),
        content,
    )


class RawServer:
    """Answers each request with `script(number of the connection, body)`: bytes, or a coroutine
    given the writer.
    """

    def __init__(self, script) -> None:
        self.script = script
        self.heads = []
        self.bodies = []
        self.writers = []

    async def __call__(self, reader, writer):
        number = len(self.writers)
        self.writers.append(writer)
        try:
            while True:
                self.heads.append(await reader.readuntil(b"\r\n\r\n"))
                _, declared, rest = self.heads[-1].lower().partition(b"content-length:")
                length = int(rest.split(b"\r\n")[0]) if declared else 0
                self.bodies.append(await reader.readexactly(length))
                said = self.script(number, self.bodies[-1])
                if isinstance(said, bytes):
                    writer.write(said)
                else:
                    await said(writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def open(self) -> int:
        return sum(not writer.transport.is_closing() for writer in self.writers)


def client_of(url: str) -> ServerClient:
    config = EngineConfig(kind="sglang")
    return ServerClient("engine-3", url, Keys("the-api-key", "the-admin-key"), config=config)


def against(script, use, *, host="127.0.0.1", tls=None, scheme="http"):
    """Run `use(client, server)` against a server that follows `script`."""

    async def main():
        server = RawServer(script)
        async with listening(server, server.writers, host, tls) as port:
            client = client_of(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
            try:
                return await use(client, server)
            finally:
                await client.close()

    return run_steadily(asyncio.wait_for(main(), 30))


@asynccontextmanager
async def listening(server, writers, host="127.0.0.1", tls=None):
    listener = await asyncio.start_server(server, host, 0, ssl=tls)
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for writer in writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)


async def ask(client, body="x", timeout_s=5.0):
    client.config.update_timeout_s = timeout_s
    return await client.post("/generate", {"said": body})


def saying(*parts: bytes, close: bool = False, pause_s: float = 0.01):
    """A script of one answer in pieces."""

    async def say(writer):
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)
        if close:
            writer.close()

    return lambda *_: say


def closing(*_):
    async def close(writer):
        writer.close()

    return close
