"""Why a server of ours does not answer: where its process has ended, the end of its log says more
than a broken connection.
"""

from __future__ import annotations

import asyncio

import pytest

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import EngineFailed
from rollout.engines.factories import Keys
from rollout.engines.sglang.engine import SGLangEngine


class Server:
    name = "engine-3"
    managed = True

    def __init__(self) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def compiles(self) -> bool:
        return False

    def describe_end(self) -> str:
        return "killed by SIGKILL; the end of its log: out of memory"


def probe_error(after_s: float | None) -> str:
    """Probe a server that does not answer, and whose process ends after so many seconds."""

    async def main() -> str:
        server = Server()
        engine = SGLangEngine(
            server, config=EngineConfig(kind="sglang"), keys=Keys("a", "b"), model_path="none"
        )
        if after_s is not None:
            asyncio.get_running_loop().call_later(after_s, server.ended.set_result, -9)
        with pytest.raises(EngineFailed) as caught:
            await engine.health()
        return str(caught.value)

    return asyncio.run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.1])
def test_the_end_of_the_log_is_the_reason(after_s: float) -> None:
    assert (
        probe_error(after_s)
        == "engine engine-3 died: killed by SIGKILL; the end of its log: out of memory"
    )


def test_a_server_that_still_runs_is_ill_for_its_own_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.engines.server_client.BROKEN_CONNECTION_S", 0.05)
    assert "died" not in probe_error(None)
