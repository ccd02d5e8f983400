"""An engine without a model for in_flight.py: a conversation's next turn after a set time.

It is in the thread of the rollouts, and writes a line a second about it to $LOAD_FILE.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer

from rlcore.config.engine_registry import EngineKind
from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import VersionSpan
from tests.unit.rollout.fake_engine import FakeEngine

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call>'
ANSWER = "46"


class TimedEngine(FakeEngine):
    """Every turn but the last is a call of a tool.

    `rollout.engine.server` has `turns`, and `turn_s`: the seconds of a turn, half to one and a half
    of it by the request's address.
    """

    kind = EngineKind(title="the timed engine", own_keys=("server", "max_in_flight"))

    @classmethod
    def build(cls, site: Any) -> list[TimedEngine]:
        """See `EngineFactory`."""
        engine = cls(lambda request, sample: [])
        tokenizer = AutoTokenizer.from_pretrained(site.config.model.path)
        server = site.config.rollout.engine.server
        engine.turns = int(server["turns"])
        engine.turn_s = float(server["turn_s"])
        engine.call, engine.answer = (
            np.array([*tokenizer.encode(text), tokenizer.eos_token_id], dtype=np.int32)
            for text in (CALL, ANSWER)
        )
        engine.transports = ("disk",)  # which reaches it in any process
        engine.waiting = {}
        engine.made = 0
        return [engine]

    turns: int
    turn_s: float
    call: NDArray[np.int32]
    answer: NDArray[np.int32]
    waiting: dict[str, asyncio.Future[bool]]  # by request id: whether it was aborted
    made: int  # tokens

    async def start(self) -> None:
        """See `RolloutEngine.start`."""
        await super().start()
        self._noting = asyncio.get_running_loop().create_task(self._note())

    async def close(self) -> None:
        """See `RolloutEngine.close`."""
        self._noting.cancel()
        await super().close()

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """See `RolloutEngine.generate`."""
        [request] = requests
        address = [request.seed, request.draw, request.samples[0], request.turn]
        seconds = self.turn_s * np.random.default_rng(address).uniform(0.5, 1.5)
        ended = asyncio.get_running_loop().create_future()
        self.waiting[request.rid] = ended
        timer = asyncio.get_running_loop().call_later(
            seconds, lambda: ended.done() or ended.set_result(False)
        )
        try:
            aborted = await ended
        finally:
            timer.cancel()
            del self.waiting[request.rid]
        return [[self._answer(request, aborted) for _ in range(request.n)]]

    def _answer(self, request: GenerateRequest, aborted: bool) -> Completion:
        tokens = self.call if request.turn + 1 < self.turns else self.answer
        tokens = tokens[:0] if aborted else tokens
        self.made += len(tokens)
        return Completion(
            tokens=tokens,
            logprobs=np.full(len(tokens), -0.5, dtype=np.float32),
            finish_reason="abort" if aborted else "stop",
            versions=(VersionSpan(self.version, 0, len(tokens)),) if len(tokens) else (),
        )

    async def abort(self, rids: Sequence[str] | None = None) -> None:
        """See `RolloutEngine.abort`."""
        for rid in self.waiting if rids is None else rids:
            if rid in self.waiting and not self.waiting[rid].done():
                self.waiting[rid].set_result(True)

    async def load_folder(self, *given: Any) -> None:
        """See `RolloutEngine.load_folder`; there is no model to load."""

    async def progress(self) -> int:
        """See `RolloutEngine.progress`."""
        return self.made

    async def _note(self) -> None:
        with open(os.environ["LOAD_FILE"], "w", buffering=1) as file:
            while True:
                resident = int(Path("/proc/self/statm").read_text().split()[1])
                line = {
                    "at": time.monotonic(),
                    "thread_s": time.thread_time(),
                    "threads": threading.active_count(),
                    "tokens": self.made,
                    "in_flight": len(self.waiting),
                    "resident": resident * os.sysconf("SC_PAGE_SIZE"),
                }
                file.write(json.dumps(line) + "\n")
                await asyncio.sleep(1.0)
