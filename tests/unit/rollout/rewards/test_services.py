"""Reward services and judges, against a server that is slow, down, busy, lying or huge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from patient_loop import run_steadily
from pydantic import ValidationError

from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.reward_services import JudgeConfig, RewardServiceConfig
from rlcore.config.sections.sandbox import SandboxConfig
from rlcore.data.sample import Sample
from rlcore.errors import ConfigError
from rollout import json_client
from rollout.json_client import JsonClient, NoAnswer
from rollout.rewards.base import RewardFailure, RewardPart, Score, Verdict
from rollout.rewards.scorer import build_scorer
from rollout.rewards.services import JudgePart, ServicePart, client_of, filled

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MakeSample = Callable[..., Sample]


class AsyncioWith:
    """The module asyncio with another `sleep`."""

    def __init__(self, sleep: Callable[[float], Awaitable[None]]) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    """Serve `handler` at every route; yield the URL."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def answering(
    answer: Callable[[Any], Any], seen: list[Any] | None = None, status: int = 200
) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if seen is not None:
            seen.append(body)
        return web.json_response(answer(body), status=status)

    return handle


async def scores_of(part: RewardPart, samples: list[Sample]) -> list[Score]:
    try:
        return await asyncio.wait_for(part.score(samples), 60)
    finally:
        await part.close()


def ask(handler: Handler, samples: list[Sample], **config: Any) -> list[Score]:
    async def run() -> list[Score]:
        async with served(handler) as url:
            given = RewardServiceConfig(url=url + "/rm", **config)
            return await scores_of(ServicePart("rm", given), samples)

    return run_steadily(run())


def judge(handler: Handler, samples: list[Sample], **config: Any) -> list[Score]:
    async def run() -> list[Score]:
        async with served(handler) as url:
            given = JudgeConfig(url=url + "/v1", model="judge", **config)
            return await scores_of(JudgePart("j", given), samples)

    return run_steadily(run())


def failure_of(scores: list[Score]) -> RewardFailure:
    [got] = scores
    assert isinstance(got, RewardFailure)
    return got


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    raise AssertionError


RIGHT = web.json_response, {"data": 1.0}


def in_turn(*answers: Any) -> tuple[Handler, list[str]]:
    """Serve the answers one after the other, then the last again; with the routes so far."""
    asked: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        answer = answers[min(len(asked), len(answers)) - 1]
        if callable(answer):
            return await answer(request)
        make, arguments = answer
        return make(**arguments)

    return handle, asked


def said(text: str) -> Handler:
    return answering(lambda body: {"choices": [{"message": {"content": text}}]})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_client, "FIRST_PAUSE_S", 0.01)


def test_a_file_of_authorities_that_is_missing_is_told_before_anything_is_asked() -> None:
    given = RewardServiceConfig(url="https://host/rm", ca_file="missing.pem")
    where = "reward.parts.rm.service"
    with pytest.raises(ConfigError, match=f"{where}.ca_file: missing.pem does not exist"):
        client_of(where, given)


# --- formats --------------------------------------------------------------------------------------


def test_slime(sample: MakeSample) -> None:
    seen: list[Any] = []
    samples = [sample("two", index=0, source="book"), sample("three", index=1)]
    got = ask(answering(lambda body: float(len(body["response"])), seen), samples)
    assert got == [Verdict(3.0), Verdict(5.0)]
    assert sorted(seen, key=lambda body: body["response"])[1] == {
        "prompt": "1+1=", "response": "two", "label": "2", "metadata": {"source": "book"},
    }  # fmt: skip


def test_slime_with_a_key_and_a_verdict(sample: MakeSample) -> None:
    [got] = ask(answering(lambda body: {"reward": 0.5}), [sample("x")], key="reward")
    assert got == Verdict(0.5)
    [got] = ask(answering(lambda body: {"score": 1, "correct": True}), [sample("x")])
    assert got == Verdict(1.0, True)


def test_openrlhf_in_batches_across_groups(sample: MakeSample) -> None:
    seen: list[Any] = []

    def rewards(body: Any) -> Any:
        return {"rewards": [float(len(text)) for text in body["query"]], "extra_logs": {}}

    samples = [sample("a" * size, index=size) for size in range(1, 8)]

    async def run() -> list[list[Score]]:
        async with served(answering(rewards, seen)) as url:
            given = RewardServiceConfig(url=url, format="openrlhf", batch_size=4)
            part = ServicePart("rm", given)
            groups = (samples[:3], samples[3:])
            try:
                return list(await asyncio.gather(*(part.score(group) for group in groups)))
            finally:
                await part.close()

    first, second = run_steadily(run())
    assert [*first, *second] == [Verdict(4.0 + size) for size in range(1, 8)]
    assert sorted(len(body["query"]) for body in seen) == [3, 4]
    assert seen[0]["prompts"][0] == "1+1="
    assert seen[0]["labels"][0] == "2"


def test_sglang(sample: MakeSample) -> None:
    handler = answering(lambda body: [{"embedding": [-1.5]} for _ in body["text"]])
    got = ask(handler, [sample("x"), sample("y")], format="sglang", batch_size=8)
    assert got == [Verdict(-1.5)] * 2


# --- servers that misbehave -----------------------------------------------------------------------


LISTS = {"format": "openrlhf", "batch_size": 2}
EMBEDDINGS = {"format": "sglang", "batch_size": 2}


@pytest.mark.parametrize(
    ("answer", "config", "reason"),
    [
        ({"reward": 1}, {}, "unknown key 'reward'"),
        ("1.0", {}, "'1.0', expected a number"),
        (None, {}, "expected a number"),
        ([1.0], {}, "expected a number"),
        (1e39, {}, "expected a finite number"),
        ({"score": 1}, {"key": "reward"}, "no key 'reward'; got the keys score"),
        ({"rewards": [1.0]}, LISTS, "1 values, expected a list of 2"),
        ({"rewards": 1.0}, LISTS, "expected a list of 2"),
        ([{"embedding": [1.0, 2.0]}] * 2, EMBEDDINGS, "an embedding of 2"),
        ([{"embedding": 1.0}] * 2, EMBEDDINGS, "an embedding of no list"),
    ],
)  # fmt: skip
def test_an_answer_of_another_form_is_a_failure(
    sample: MakeSample, answer: Any, config: dict[str, Any], reason: str
) -> None:
    for got in ask(answering(lambda body: answer), [sample("x"), sample("y")], **config):
        assert isinstance(got, RewardFailure)
        assert reason in got.reason


def test_one_bad_score_of_a_batch_fails_alone(sample: MakeSample) -> None:
    handler = answering(lambda body: {"rewards": [1.0, None]})
    first, second = ask(handler, [sample("x"), sample("y")], format="openrlhf", batch_size=2)
    assert first == Verdict(1.0)
    assert isinstance(second, RewardFailure)


def test_a_server_that_is_down(sample: MakeSample) -> None:
    config = RewardServiceConfig(url="http://127.0.0.1:9", retries=1)
    got = failure_of(run_steadily(scores_of(ServicePart("rm", config), [sample("x")])))
    assert "http://127.0.0.1:9 cannot be asked: ClientConnectorError" in got.reason


@pytest.mark.parametrize("luck", [0.0, 1.0])
@pytest.mark.parametrize(
    ("retries", "least_s", "most_s"),
    [
        (0, 0, 0),
        (3, 3.5, 5.3),
        (6, 31, 48),
        (RewardServiceConfig(url="http://rm").retries, 90, 110),
        (JudgeConfig(url="http://rm", model="m").retries, 90, 110),
        (SandboxConfig().retries, 90, 110),
        (12, 211, 228),
    ],
)
def test_the_pauses_of_the_default_last_through_a_restart(
    monkeypatch: pytest.MonkeyPatch, retries: int, least_s: float, most_s: float, luck: float
) -> None:
    """The seconds are those of docs/rewards.md."""
    pauses: list[float] = []

    async def paused(seconds: float) -> None:
        pauses.append(seconds)

    async def run() -> None:
        client = JsonClient(
            ["http://127.0.0.1:9"], where="rm", timeout_s=5.0, retries=retries,
            concurrency=1, answer_bytes=1,
        )  # fmt: skip
        try:
            with pytest.raises(NoAnswer):
                await client.post({})
        finally:
            await client.close()

    monkeypatch.setattr(json_client, "FIRST_PAUSE_S", 0.5)
    monkeypatch.setattr(json_client, "asyncio", AsyncioWith(sleep=paused))
    monkeypatch.setattr("random.uniform", lambda low, high: low + luck * (high - low))
    run_steadily(run())
    assert len(pauses) == retries
    assert least_s <= sum(pauses) <= most_s


def test_a_huge_answer_is_not_read(sample: MakeSample) -> None:
    sent = 0

    async def huge(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(1000):
            await response.write(b"1" * (1 << 20))
            sent += 1
        return response

    assert "answered more than 4 MiB" in failure_of(ask(huge, [sample("x")])).reason
    assert sent < 100


PAGE = web.Response, {"text": "<html>wait"}
BUSY = {"text": "busy", "headers": {"Retry-After": "0"}}


@pytest.mark.parametrize(
    "busy", [PAGE, *((web.Response, {"status": status, **BUSY}) for status in (408, 429, 500, 503))]
)
def test_trouble_that_passes_is_asked_again(sample: MakeSample, busy: Any) -> None:
    handler, asked = in_turn(busy, busy, RIGHT)
    assert ask(handler, [sample("x")]) == [Verdict(1.0)]
    assert len(asked) == 3


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b" ")
        await asyncio.sleep(0.05)


LATE = "gave no answer in 0.3 s (reward.parts.rm.service)"
LONG = {"status": 422, "text": "no label\x1b[31m" + "x" * 1000}
ELSEWHERE = {"status": 302, "headers": {"Location": "http://127.0.0.1:9/"}}


@pytest.mark.parametrize(
    ("answer", "config", "kind", "reason", "times"),
    [
        (never, {"timeout_s": 0.3, "retries": 1}, "timeout", LATE, 2),
        (drip, {"timeout_s": 0.3, "retries": 0}, "timeout", LATE, 1),
        (PAGE, {"retries": 0}, "error", "answered no JSON", 1),
        (PAGE, {"retries": 1}, "error", "'<html>wait'", 2),
        # neither asked again nor followed
        ((web.Response, LONG), {}, "error", "answered 422: 'no label [31mxxx", 1),
        ((web.Response, ELSEWHERE), {}, "error", "answered 302", 1),
    ],
)
def test_a_server_that_gives_no_answer_is_a_failure_that_says_how(
    sample: MakeSample, answer: Any, config: dict[str, Any], kind: str, reason: str, times: int
) -> None:
    handler, asked = in_turn(answer)
    got = failure_of(ask(handler, [sample("x")], **config))
    assert (got.kind, len(asked)) == (kind, times)
    assert reason in got.reason
    assert len(got.reason) < 400


def test_concurrency_is_bounded_and_servers_take_turns(sample: MakeSample) -> None:
    busy = 0
    most = 0
    routes: list[str] = []

    async def counting(request: web.Request) -> web.StreamResponse:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        routes.append(request.path)
        await asyncio.sleep(0.02)
        busy -= 1
        return web.json_response(1.0)

    async def run() -> list[Score]:
        async with served(counting) as url:
            config = RewardServiceConfig(url=[url + "/a", url + "/b"], concurrency=3)
            samples = [sample("x", index=k) for k in range(12)]
            return await scores_of(ServicePart("rm", config), samples)

    assert run_steadily(run()) == [Verdict(1.0)] * 12
    assert most == 3
    assert routes.count("/a") == routes.count("/b") == 6


def test_closing_ends_calls_in_flight(sample: MakeSample) -> None:
    async def run() -> None:
        async with served(never) as url:
            part = ServicePart("rm", RewardServiceConfig(url=url))
            call = asyncio.ensure_future(part.score([sample("x")]))
            await asyncio.sleep(0.2)
            await part.close()
            with pytest.raises(asyncio.CancelledError):
                await call

    run_steadily(asyncio.wait_for(run(), 30))


# --- judges ---------------------------------------------------------------------------------------


def test_a_judge_rates(sample: MakeSample) -> None:
    seen: list[Any] = []
    reply = {"choices": [{"message": {"content": "first [[2]], no: [[ 7.5 ]]"}}]}
    [got] = judge(
        answering(lambda body: reply, seen), [sample("two")], correct_from=6,
        extra_body={"top_p": 0.9},
    )  # fmt: skip
    assert got == Verdict(0.75, True, info={"judge": "first [[2]], no: [[ 7.5 ]]"})
    [body] = seen
    assert body["model"] == "judge"
    assert (body["temperature"], body["max_tokens"], body["top_p"]) == (0.0, 1024, 0.9)
    [user] = body["messages"]
    assert "1+1=" in user["content"]
    assert "[answer]\ntwo\n[end of answer]" in user["content"]


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (said("I like it"), "gave no rating; its answer ends 'I like it'"),
        (said("[[11]]"), "rating 11 is not in 0 to 10"),
        (said("[[-1]]"), "rating -1 is not in 0 to 10"),
        (answering(lambda body: {"choices": []}), "no chat completion"),
        (answering(lambda body: "ok"), "no chat completion: 'ok'"),
        (answering(lambda body: {"choices": [{"message": {"content": None}}]}), "without text"),
    ],
)
def test_a_judge_without_a_rating_is_a_failure(
    sample: MakeSample, handler: Handler, reason: str
) -> None:
    assert reason in failure_of(judge(handler, [sample("x")])).reason


def test_a_response_names_no_other_field(sample: MakeSample) -> None:
    given = sample("{label} {prompt}", label="secret")
    assert filled("Q: {prompt} A: {response} ({0})", given) == "Q: 1+1= A: {label} {prompt} ({0})"
    assert filled("{response}{label}", sample("x", label=None)) == "x"


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({}, "one of `function: NAME`"),
        ({"function": "math", "service": {"url": "http://a"}}, "one of `function: NAME`"),
        ({"service": {"url": "localhost:80"}}, "expected http://"),
        ({"service": {"url": []}}, "at least one URL"),
        ({"service": {"url": "http://a", "batch_size": 2}}, "one sample a request"),
        ({"service": {"url": "http://a", "format": "sglang", "key": "x"}}, "remove `key`"),
        ({"judge": {"url": "http://a", "model": "m", "template": "rate"}}, "{response}"),
        ({"judge": {"url": "http://a", "model": "m", "pattern": "x"}}, "expected one group"),
        ({"judge": {"url": "http://a", "model": "m", "pattern": "("}}, "not a regular expression"),
        ({"judge": {"url": "http://a", "model": "m", "low": 3, "high": 3}}, "must be below"),
        ({"judge": {"url": "http://a", "model": "m"}, "args": {"a": 1}}, "`args` are for"),
    ],
)
def test_a_part_that_cannot_be_is_refused(part: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        RewardConfig(parts={"x": part})
    assert message in str(error.value)


def test_keys_come_from_the_environment(
    sample: MakeSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = RewardConfig(
        parts={"rm": {"service": {"url": "http://127.0.0.1:9", "api_key_env": "RM_KEY"}}}
    )
    monkeypatch.delenv("RM_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"^reward\.parts\.rm\.service\.api_key_env: .*RM_KEY"):
        build_scorer(given)
    monkeypatch.setenv("RM_KEY", "hush")
    got: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        got.append(request.headers["Authorization"])
        return web.json_response(1.0)

    ask(handle, [sample("x")], api_key_env="RM_KEY")
    assert got == ["Bearer hush"]


def test_a_sample_that_comes_as_the_last_request_ends_is_sent(sample: MakeSample) -> None:
    """The one sender has ended, and is gone in the same turn of the loop."""

    async def run() -> None:
        part = ServicePart("x", RewardServiceConfig(url="http://127.0.0.1:9", concurrency=1))
        answers = asyncio.Event()
        asked: list[Any] = []

        async def ask(samples: list[Sample]) -> list[Score]:
            asked.append(samples)
            await answers.wait()
            return [Verdict(1.0)] * len(samples)

        part._ask = ask  # type: ignore[method-assign]

        async def another() -> list[Score]:
            await answers.wait()
            return await part.score([sample("b")])

        first = asyncio.ensure_future(part.score([sample("a")]))
        while not asked:
            await asyncio.sleep(0)
        second = asyncio.ensure_future(another())
        await asyncio.sleep(0)
        answers.set()
        assert await asyncio.wait_for(asyncio.gather(first, second), 30) == [[Verdict(1.0)]] * 2
        assert part._senders == set()

    run_steadily(run())


def test_the_scorer_adds_service_and_judge_up(sample: MakeSample) -> None:
    async def both(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/chat/completions"):
            return web.json_response({"choices": [{"message": {"content": "[[5]]"}}]})
        return web.json_response({"score": 1.0, "correct": True})

    async def run() -> Sample:
        async with served(both) as url:
            config = RewardConfig(
                parts={
                    "rm": {"service": {"url": url}},
                    "judge": {"judge": {"url": url, "model": "m"}, "weight": 2.0},
                }
            )
            scorer = build_scorer(config)
            await scorer.start()
            scored = sample("x")
            counts = await scorer.score([scored])
            await scorer.close()
            assert (counts.errors, counts.timeouts) == (0, 0)
            return scored

    scored = run_steadily(run())
    assert scored.reward == 2.0
    assert scored.reward_parts == {"rm": 1.0, "judge": 0.5}
    assert scored.metadata["correct"] is True
