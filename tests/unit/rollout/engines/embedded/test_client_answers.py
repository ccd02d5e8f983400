"""What an embedded engine's process answers is bounded, and checked against what is in force."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web
from engine_kit import request

from rlcore.config.sections.rollout import EngineConfig
from rlcore.data.generation import Completion, Drafts
from rlcore.data.sample import VersionSpan
from rlcore.errors import EngineFailed
from rollout.engines.embedded import client
from rollout.engines.embedded.client import RemoteEngine, decode_completion, encode_completion


class Running:
    """A process that runs already."""

    name = "engine-0"
    managed = True
    pid = 1

    def __init__(self, url: str) -> None:
        self.url = url
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def start(self) -> str:
        return self.url


def with_engine(answers: dict[str, Any], use: Callable[[RemoteEngine], Awaitable[None]]) -> None:
    """Run `use(engine)` against a process that answers verbs with `answers`, else with null."""

    async def main() -> None:
        async def serve(asked: web.Request) -> web.StreamResponse:
            said = answers.get(asked.match_info["verb"])
            if isinstance(said, bytes):
                return web.Response(body=said)
            return web.json_response({"result": said})

        app = web.Application()
        app.router.add_post("/{verb}", serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server: Any = Running(f"http://127.0.0.1:{runner.addresses[0][1]}")
        engine = RemoteEngine(server, config=EngineConfig(), key="key")
        await engine.start()
        try:
            await use(engine)
        finally:
            await engine._hang_up()
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(main(), 30))


def completion(version: int) -> dict[str, Any]:
    spans = (VersionSpan(version, 0, 2),)
    tokens = np.array([1, 2], dtype=np.int32)
    return encode_completion(Completion(tokens, np.zeros(2, np.float32), "length", spans))


def test_counts_of_drafts_survive_the_wire() -> None:
    one = np.ones(1, dtype=np.int32)
    spans = (VersionSpan(1, 0, 1),)
    for drafts in (None, Drafts(6, 3, 2)):
        sent = Completion(one, -one.astype(np.float32), "stop", spans, drafts=drafts)
        assert (
            decode_completion(orjson.loads(orjson.dumps(encode_completion(sent)))).drafts == drafts
        )


@pytest.mark.parametrize("version", [999, 3, -3])
def test_a_version_that_was_not_in_force_is_the_engines_failure(version: int) -> None:
    answers: dict[str, Any] = {"generate": [[completion(4)]]}

    async def use(engine: RemoteEngine) -> None:
        await engine.set_version(4)
        [[found]] = await engine.generate([request([1])])
        assert found.versions == (VersionSpan(4, 0, 2),)
        answers["generate"] = [[completion(version)]]
        with pytest.raises(EngineFailed, match=f"engine-0 says that version {version} .*4 to 4"):
            await engine.generate([request([1])])

    with_engine(answers, use)


def test_answers_without_end_are_not_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONTROL_BYTES", 1000)
    monkeypatch.setattr(client, "COMPLETIONS_BYTES", 2000)

    async def use(engine: RemoteEngine) -> None:
        with pytest.raises(EngineFailed, match="answered /progress with more than 1,000 bytes"):
            await engine.progress()
        with pytest.raises(EngineFailed, match="answered /generate with more than 2,000 bytes"):
            await engine.generate([request([1])])

    with_engine({"progress": b" " * 1500, "generate": b" " * 2500}, use)
