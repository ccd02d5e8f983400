"""The reward-model server: concurrent requests in one batch, limits, refusals, a clean end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest

from rlcore.config.sections.reward_services import RewardServiceConfig
from rlcore.data.sample import Sample
from rlcore.errors import ConfigError, DataError
from rollout.rewards.base import RewardFailure, Score, Verdict
from rollout.rewards.services import classify_server
from rollout.rewards.services.classify_server import ClassifyServer, Tokens
from rollout.rewards.services.part import ServicePart

LONGEST = 20
MakeSample = Callable[..., Sample]


def letters(texts: Sequence[str]) -> list[Tokens]:
    """Each letter is a token, a to z."""
    if any("?" in text for text in texts):
        raise DataError("text 1: lacks the symbol '?'")
    return [np.array([ord(c) - ord("a") for c in text], dtype=np.int32) for text in texts]


def total(tokens: Tokens) -> float:
    return float(tokens.sum())


class Scoring:
    """A server with a thread that scores a text by the sum of its letters."""

    def __init__(self, server: ClassifyServer, port: int) -> None:
        self.server = server
        self.port = port
        self.batches: list[int] = []
        self.go = threading.Event()
        self.go.set()
        self.score: Callable[[Tokens], float] = total
        self._stands = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.is_set():
            if not self.go.is_set():
                self._stands.set()
                self.go.wait()
            taken = self.server.take(LONGEST, timeout_s=0.02)
            if taken:
                self.batches.append(len(taken))
                self.server.answer(taken, [self.score(text.tokens) for text in taken])

    def pause(self) -> None:
        """Let the thread stand still, after its wait for texts."""
        self._stands.clear()
        self.go.clear()
        assert self._stands.wait(60)

    def end(self) -> None:
        self._ended.set()
        self.go.set()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def scoring(**options: Any) -> Iterator[Scoring]:
    server = ClassifyServer(letters, max_tokens=LONGEST, vocab_size=26, **options)
    made = Scoring(server, server.start("127.0.0.1", 0))
    try:
        yield made
    finally:
        made.end()
        server.close()


async def post(scoring: Scoring, body: Any, **headers: str) -> tuple[int, Any]:
    data = {"json": body} if not isinstance(body, bytes) else {"data": body}
    async with (
        aiohttp.ClientSession(scoring.url, headers=headers) as session,
        session.post("/classify", **data) as answer,
    ):
        return answer.status, await answer.json(content_type=None)


def ask(scoring: Scoring, body: Any, **headers: str) -> tuple[int, Any]:
    return asyncio.run(post(scoring, body, **headers))


def test_texts_and_tokens_are_scored_in_their_order() -> None:
    with scoring() as made:
        status, rows = ask(made, {"text": ["b", "cc", "zzz"]})
        assert status == 200
        assert [row["embedding"] for row in rows] == [[1.0], [4.0], [75.0]]
        assert [row["meta_info"]["prompt_tokens"] for row in rows] == [1, 2, 3]
        status, rows = ask(made, {"input_ids": [[1], [2, 2]]})
        assert [row["embedding"] for row in rows] == [[1.0], [4.0]]
        assert ask(made, {"text": "cc"})[1]["embedding"] == [4.0], "one text, as SGLang answers it"
        assert ask(made, {"input_ids": [2, 2]})[1]["embedding"] == [4.0]


def test_requests_that_wait_are_scored_together_up_to_the_budget() -> None:
    async def run(made: Scoring) -> list[tuple[int, Any]]:
        made.pause()
        asked = [asyncio.ensure_future(post(made, {"text": ["bbbbbb"]})) for _ in range(5)]
        while len(made.server._texts) < 5:
            await asyncio.sleep(0.01)
        made.go.set()
        return await asyncio.gather(*asked)

    with scoring() as made:
        assert [rows[0]["embedding"] for _, rows in asyncio.run(run(made))] == [[6.0]] * 5
        assert made.batches == [3, 2], "18 of 20 tokens, then the rest"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{", 400, "no JSON"),
        ({}, 400, "expected {"),
        ({"text": []}, 400, "expected {"),
        ([1], 400, "expected {"),
        ({"text": ["a", 1]}, 400, "texts alone, or token ids alone"),
        ({"input_ids": [[1.5]]}, 400, "texts alone, or token ids alone"),
        ({"input_ids": [[True]]}, 400, "texts alone, or token ids alone"),
        ({"input_ids": [[1, 1 << 40]]}, 400, "input_ids"),
        ({"input_ids": [[26]]}, 400, "text 1 has tokens from 26 to 26, the model knows 0 to 25"),
        ({"input_ids": [[1], [-1]]}, 400, "text 2 has tokens from -1"),
        ({"text": ["a", ""]}, 400, "text 2 has 0 tokens, expected 1 to 20"),
        ({"text": ["a" * 21]}, 400, "text 1 has 21 tokens, expected 1 to 20"),
        ({"text": ["?"]}, 400, "lacks the symbol"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused_with_its_reason(
    body: Any, status: int, reason: str
) -> None:
    with scoring() as made:
        got, answer = ask(made, body)
        assert (got, reason in answer["error"]["message"]) == (status, True), answer
        assert ask(made, {"text": ["b"]})[0] == 200, "and the server goes on"


def test_a_huge_body_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify_server, "MAX_BODY", 1000)
    with scoring() as made:
        assert asyncio.run(refused(made, b"[" + b" " * 2000)) == 413


async def refused(made: Scoring, body: bytes) -> int:
    async with (
        aiohttp.ClientSession(made.url) as session,
        session.post("/classify", data=body) as answer,
    ):
        return answer.status


def test_a_full_queue_sends_requests_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify_server, "MAX_WAITING_TOKENS", 10)

    async def run(made: Scoring) -> tuple[int, int]:
        made.pause()
        first = asyncio.ensure_future(post(made, {"text": ["a" * 11]}))
        while not made.server._texts:
            await asyncio.sleep(0.01)
        status, answer = await post(made, {"text": ["a"]})
        assert "11 tokens wait to be scored already" in answer["error"]["message"]
        made.go.set()
        return status, (await first)[0]

    with scoring() as made:
        assert asyncio.run(run(made)) == (503, 200)


def test_too_many_requests_are_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify_server, "MAX_REQUESTS", 0)
    with scoring() as made:
        status, answer = ask(made, {"text": ["a"]})
        assert (status, answer["error"]["message"]) == (503, "too many requests")


def test_a_score_that_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify_server, "SCORE_S", 0.3)
    with scoring() as made:
        made.pause()
        status, answer = ask(made, {"text": ["a"]})
        assert (status, answer["error"]["message"]) == (504, "no score within 0.3 s")
        monkeypatch.setattr(classify_server, "SCORE_S", 60.0)
        made.go.set()
        assert ask(made, {"text": ["b"]})[1][0]["embedding"] == [1.0]


def test_a_client_that_leaves_takes_its_texts_along() -> None:
    async def run(made: Scoring) -> None:
        made.pause()
        leaving = asyncio.ensure_future(post(made, {"text": ["a", "a"]}))
        while len(made.server._texts) < 2:
            await asyncio.sleep(0.01)
        waiting = list(made.server._texts)
        leaving.cancel()
        while not all(text.score.done() for text in waiting):
            await asyncio.sleep(0.01)
        made.go.set()
        assert (await post(made, {"text": ["b"]}))[0] == 200

    with scoring() as made:
        asyncio.run(asyncio.wait_for(run(made), 30))
        assert made.batches == [1]


def test_the_end_answers_what_waits() -> None:
    async def run(made: Scoring) -> tuple[int, Any]:
        made.pause()
        asked = asyncio.ensure_future(post(made, {"text": ["a"]}))
        while not made.server._texts:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(made.server.close)
        return await asked

    server = ClassifyServer(letters, max_tokens=LONGEST, vocab_size=26)
    made = Scoring(server, server.start("127.0.0.1", 0))
    status, answer = asyncio.run(asyncio.wait_for(run(made), 30))
    assert (status, answer["error"]["message"]) == (503, "the server is ending")
    made.end()


def test_a_key_is_asked_for_and_health_is_not_guarded() -> None:
    with scoring(key="secret") as made:
        assert ask(made, {"text": ["b"]})[0] == 401
        assert ask(made, {"text": ["b"]}, Authorization="Bearer wrong")[0] == 401
        assert ask(made, {"text": ["b"]}, Authorization="Bearer secret")[0] == 200

        async def health() -> Any:
            async with (
                aiohttp.ClientSession(made.url) as session,
                session.get("/health") as answer,
            ):
                return answer.status, await answer.json()

        assert asyncio.run(health()) == (200, {"waiting": 0, "scored": 1})


def test_an_address_that_is_taken() -> None:
    with scoring() as made:
        second = ClassifyServer(letters, max_tokens=LONGEST, vocab_size=26)
        with pytest.raises(ConfigError, match=rf"--port {made.port}: cannot listen"):
            second.start("127.0.0.1", made.port)
        second.close()


def test_reward_services_use_it_as_it_is(sample: MakeSample) -> None:
    """The client is the one of runs; a score that is not finite fails its sample alone."""

    async def scores(url: str, samples: list[Sample]) -> list[Score]:
        part = ServicePart(
            "rm", RewardServiceConfig(url=url, format="sglang", batch_size=2, retries=0)
        )
        try:
            return await part.score(samples)
        finally:
            await part.close()

    samples = [sample(text, index=i) for i, text in enumerate(("b", "c", "d"))]
    for one in samples:
        one.prompt_text = "a"
    with scoring() as made:
        made.score = lambda tokens: float("nan") if tokens[-1] == 2 else total(tokens)
        first, second, third = asyncio.run(scores(f"{made.url}/classify", samples))
    assert (first, third) == (Verdict(1.0), Verdict(3.0))
    assert isinstance(second, RewardFailure)
    assert "expected a number" in second.reason
