"""The engine process of publish.py: the stock one with a clock, and with a raw receive."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rollout.engines.embedded import server
from rollout.weight_sync.process_group import GroupAddress, WeightGroup


class Receiver(server.EngineServer):
    def __init__(self, engine: Any, key: str) -> None:
        super().__init__(engine, key)
        self._raw: WeightGroup | None = None
        self._seconds = {"wire": 0.0, "apply": 0.0}
        self.verbs |= {
            "raw_join": self._raw_join,
            "raw_receive": self._raw_receive,
            "seconds": self._take_seconds,
        }
        engine.receive_bucket = self._timed("apply", engine.receive_bucket)

    async def _join_group(self, body: dict[str, Any]) -> None:
        await super()._join_group(body)
        assert self._group is not None
        self._group.receive = self._timed_call(self._group.receive)  # type: ignore[method-assign]

    def _timed(self, what: str, work: Any) -> Any:
        async def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = await work(*arguments)
            self._seconds[what] += time.perf_counter() - began
            return result

        return call

    def _timed_call(self, receive: Any) -> Any:
        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = receive(*arguments)
            self._seconds["wire"] += time.perf_counter() - began
            return result

        return call

    async def _raw_join(self, body: dict[str, Any]) -> None:
        self._raw = await asyncio.to_thread(
            WeightGroup, GroupAddress(**body["address"]), body["rank"], device=self.engine.device
        )

    async def _raw_receive(self, body: dict[str, Any]) -> None:
        assert self._raw is not None
        raw = self._raw

        def receive() -> None:
            for size in body["sizes"]:
                raw.receive(size)

        await asyncio.to_thread(receive)

    async def _take_seconds(self, _: dict[str, Any]) -> dict[str, float]:
        taken = self._seconds
        self._seconds = {"wire": 0.0, "apply": 0.0}
        return taken


if __name__ == "__main__":
    server.EngineServer = Receiver  # type: ignore[misc]
    server.main()
