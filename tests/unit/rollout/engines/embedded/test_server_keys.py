"""An embedded engine's server answers its key alone, whatever another one is made of."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from rlcore.boundary.http_server import HttpServer, bound
from rollout.engines.embedded.engine import EmbeddedEngine
from rollout.engines.embedded.server import EngineServer


class Engine:
    """Answers /progress."""

    async def progress(self) -> str:
        return "right"

    def __getattr__(self, verb: str) -> Any:
        return getattr(EmbeddedEngine, verb)


async def ask(port: int, authorization: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /progress HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 0\r\n"
        + authorization
        + b"\r\n"
    )
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (b"", b"401"),
        (b"Authorization: Bearer wrong\r\n", b"401"),
        (b"Authorization: \xff\r\n", b"401"),
        (b"Authorization: Bearer \xff\xfe\r\n", b"401"),
        (b"Authorization: Bearer the-key\r\n", b"200"),
    ],
)
def test_only_the_key_opens(
    authorization: bytes, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> bytes:
        server = EngineServer(Engine(), "the-key")  # type: ignore[arg-type]
        runner = await HttpServer(server.serve).listen(bound("127.0.0.1"), closes_s=0.1)
        try:
            return await ask(runner.addresses[0][1], authorization)
        finally:
            await runner.cleanup()

    with caplog.at_level(logging.WARNING):
        answer = asyncio.run(asyncio.wait_for(main(), 20))
    assert answer.split()[1] == status
    assert (b"right" in answer) == (status == b"200")
    assert caplog.text == "", "no traceback in the log"
