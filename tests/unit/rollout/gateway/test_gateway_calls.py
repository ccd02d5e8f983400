"""Calls of an agent that are repeated, made at once, abandoned, or too late."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest
from openai import APIStatusError, DefaultAsyncHttpxClient

from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import Sample
from rlcore.errors import EngineFailed, RolloutFailed
from rollout import asyncio_utils
from rollout.asyncio_utils import DaemonExecutor
from rollout.gateway.server import Gateway
from rollout.gateway.wire import Refused, read_request
from tests.unit.rollout.conversation.kit import STOP, ScriptedModel, make_context, make_tokenizer

from .agents import USER, body, by_turn, client, make_task, play, post, trained


class Held:
    """A model that answers when it is let."""

    def __init__(self, model: ScriptedModel) -> None:
        self.model = model
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.waiting = 0

    async def __call__(self, request: GenerateRequest) -> list[Completion]:
        self.asked.set()
        self.waiting += 1
        await self.go.wait()
        self.waiting -= 1
        return await self.model(request)


def play_held(
    run: Callable[..., Any], script: Any, **given: Any
) -> tuple[list[Sample], ScriptedModel]:
    """The program is also given the model that is held."""
    held: list[Held] = []

    async def program(task: Any, endpoint: Any) -> Any:
        return await run(task, endpoint, held[0])

    def model(scripted: ScriptedModel) -> Held:
        held.append(Held(scripted))
        return held[0]

    return play(program, script, model=model, **given)


def test_openais_client_that_timed_out_gets_the_turn_that_it_asked_for() -> None:
    async def run(task: Any, endpoint: Any, model: Held) -> None:
        requests = 0

        async def sent(_: Any) -> None:
            nonlocal requests
            requests += 1
            if requests == 2:
                model.go.set()

        http = DefaultAsyncHttpxClient(event_hooks={"request": [sent]})
        async with client(endpoint, timeout=0.5, http_client=http) as openai:
            reply = await openai.chat.completions.create(model="policy", messages=task.messages)
        assert (reply.choices[0].message.content, requests) == ("3", 2)

    samples, model = play_held(run, by_turn("3", "another"))
    assert trained(samples, model) == [f"3{STOP}"]
    counts = samples[0].measured
    assert (counts["turns"], counts["repeated_calls"], counts["abandoned_calls"]) == (1, 1, 0)


@pytest.mark.parametrize("attempt", [1, None], ids=["counts", "counts not"])
@pytest.mark.parametrize("running", [True, False])
def test_a_client_may_come_back(attempt: int | None, running: bool) -> None:
    async def run(task: Any, endpoint: Any, model: Held) -> None:
        first = asyncio.ensure_future(post(endpoint, body(task.messages)))
        await model.asked.wait()
        first.cancel()
        await asyncio.wait({first})
        if not running:
            model.go.set()
            other = await post(endpoint, body([*task.messages, USER]))
            assert other[1]["choices"][0]["message"]["content"] == "other"
        # the gateway has seen the client go
        second = asyncio.ensure_future(post(endpoint, body(task.messages), attempt=attempt))
        model.go.set()
        assert (await second)[1]["choices"][0]["message"]["content"] == "3"

    samples, model = play_held(run, by_turn("3", "other"))
    assert len(trained(samples, model)) == (1 if running else 2)
    assert samples[0].measured["repeated_calls"] == 1
    assert samples[0].measured["abandoned_calls"] == 0


def test_equal_calls_at_once_are_calls_of_their_own_and_so_are_their_repetitions() -> None:
    async def run(task: Any, endpoint: Any, model: Held) -> None:
        two = [asyncio.ensure_future(post(endpoint, body(task.messages))) for _ in range(2)]
        while len(model.model.requests) < 2:
            model.go.set()
            await asyncio.wait({*two}, timeout=0.01)
        texts = {a["choices"][0]["message"]["content"] for _, a in await asyncio.gather(*two)}
        assert texts == {"one", "two"}
        again = [await post(endpoint, body(task.messages), attempt=1) for _ in range(2)]
        assert {a["choices"][0]["message"]["content"] for _, a in again} == texts

    samples, model = play_held(run, by_turn("one", "two", "three"))
    assert trained(samples, model) == [f"one{STOP}", f"two{STOP}"]
    assert samples[0].measured["repeated_calls"] == 2


def test_who_comes_back_gets_the_answer_that_nobody_has_read() -> None:
    async def run(task: Any, endpoint: Any, model: Held) -> None:
        model.go.set()
        data = body(task.messages)
        assert (await post(endpoint, data))[1]["choices"][0]["message"]["content"] == "one"
        model.go.clear()
        left = asyncio.ensure_future(post(endpoint, data))
        while not model.waiting:
            await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.wait({left})
        again = asyncio.ensure_future(post(endpoint, data, attempt=1))
        model.go.set()
        assert (await again)[1]["choices"][0]["message"]["content"] == "two"

    samples, _ = play_held(run, by_turn("one", "two"))
    assert samples[0].measured["repeated_calls"] == 1


def test_who_comes_back_after_equal_calls_gets_the_last_answer() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        data = body(task.messages)
        for text in ("one", "two", "three"):
            _, answer = await post(endpoint, data, attempt=0)
            assert answer["choices"][0]["message"]["content"] == text
        _, again = await post(endpoint, data, attempt=1)
        assert again["choices"][0]["message"]["content"] == "three"

    samples, _ = play(run, by_turn("one", "two", "three"))
    assert samples[0].measured["repeated_calls"] == 1


def test_a_turn_that_is_waited_for_at_the_end_of_a_failed_program_is_refused() -> None:
    late: list[asyncio.Task[Any]] = []

    async def run(task: Any, endpoint: Any, model: Held) -> None:
        late.append(asyncio.ensure_future(post(endpoint, body(task.messages))))
        await model.asked.wait()
        raise KeyError("door")

    async def after() -> None:
        status, answer = await asyncio.wait_for(late[0], 30)
        assert (status, answer["error"]["code"]) == (410, "rollout_over")

    with pytest.raises(RolloutFailed, match="door"):
        play_held(run, by_turn("3"), after=after)


def test_an_abandoned_turn_is_waited_for_counted_and_trained() -> None:
    async def run(task: Any, endpoint: Any, model: Held) -> float:
        call = asyncio.ensure_future(post(endpoint, body(task.messages)))
        await model.asked.wait()
        call.cancel()
        asyncio.get_running_loop().call_later(0.05, model.go.set)  # when the program has ended
        return 0.0

    samples, model = play_held(run, by_turn("slow"))
    assert trained(samples, model) == [f"slow{STOP}"]
    counts = samples[0].measured
    assert (counts["turns"], counts["abandoned_calls"]) == (1, 1)


def test_a_rollout_that_lost_a_call_ends_with_the_engines_error() -> None:
    went_on = []
    ended: list[int] = []
    asked: list[asyncio.Task[Any]] = []  # by a client that the end of the program does not end

    async def ask(task: Any, endpoint: Any) -> APIStatusError:
        async with client(endpoint, max_retries=0) as openai:
            with pytest.raises(APIStatusError, match="engine-0 died") as failed:
                await openai.chat.completions.create(model="policy", messages=task.messages)
            return failed.value

    async def run(task: Any, endpoint: Any) -> float:
        asked.append(asyncio.ensure_future(ask(task, endpoint)))
        try:
            await asyncio.sleep(60)  # the rollout does not wait for it
        finally:
            ended.append(1)
        went_on.append(1)
        return 1.0

    async def after() -> None:
        failed = await asyncio.wait_for(asked[0], 30)
        assert ended, "it was cancelled, not waited for"
        assert (failed.status_code, failed.response.headers["x-should-retry"]) == (500, "false")

    broken = AsyncMock(side_effect=EngineFailed("engine-0 died"))
    with pytest.raises(EngineFailed, match="engine-0 died"):
        play(run, by_turn("3"), model=lambda _: broken, after=after)
    assert not went_on


def test_an_abandoned_turn_that_is_lost_voids_the_rollout() -> None:
    abandoned = asyncio.Event()

    async def run(task: Any, endpoint: Any) -> float:
        await post(endpoint, body(task.messages))
        call = asyncio.ensure_future(post(endpoint, body([*task.messages, USER])))
        await abandoned.wait()
        call.cancel()
        return 1.0

    def broken(model: ScriptedModel) -> Any:
        async def generate(request: GenerateRequest) -> list[Completion]:
            if request.turn:
                abandoned.set()
                await asyncio.sleep(0.5)
                raise EngineFailed("engine-0 died")
            return await model(request)

        return generate

    with pytest.raises(EngineFailed):
        play(run, by_turn("3"), model=broken)


def test_a_turn_that_an_engine_gave_up_is_made_again_with_its_draw() -> None:
    from dataclasses import replace

    asked: list[asyncio.Task[Any]] = []

    async def run(task: Any, endpoint: Any) -> float:
        asked.append(asyncio.ensure_future(post(endpoint, body(task.messages))))
        await asyncio.sleep(60)  # the rollout does not wait for it
        return 1.0

    def aborting(model: ScriptedModel) -> Any:
        async def generate(request: GenerateRequest) -> list[Completion]:
            return [replace(one, finish_reason="abort") for one in await model(request)]

        return generate

    async def after() -> None:
        status, answer = await asyncio.wait_for(asked[0], 30)
        assert (status, answer["error"]["type"]) == (500, "server_error")

    samples, _ = play(run, by_turn("3"), model=aborting, after=after)
    assert [s.finish_reason for s in samples] == ["abort"]


async def test_a_call_that_comes_in_while_the_rollout_ends_is_refused() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn("3"))

    gateway = Gateway(str)
    conversation = make_context(tokenizer).conversation(make_task(tokenizer), 0, 0, model)
    session, _ = await gateway.open(conversation)
    await gateway.close(session, drain=True)
    assert not gateway._sessions
    data = body([USER])
    asked = read_request(data, models=session.models, held=session.held)
    with pytest.raises(Refused, match="is over") as refused:
        await session.answer(data, asked, 0)
    assert refused.value.status == 410
    assert model.requests == []


def test_keys_of_other_rollouts_and_of_ended_ones_are_refused() -> None:
    import dataclasses

    late: list[asyncio.Task[Any]] = []

    async def run(task: Any, endpoint: Any) -> float:
        stranger = dataclasses.replace(endpoint, api_key="sk-1")
        status, answer = await post(stranger, body(task.messages))
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        await post(endpoint, body(task.messages))
        late.append(asyncio.ensure_future(ask_until_refused(task, endpoint)))
        return 1.0

    async def ask_until_refused(task: Any, endpoint: Any) -> None:
        while not over.is_set():
            await asyncio.sleep(0.01)
        answers.append(await post(endpoint, body(task.messages)))

    async def after() -> None:
        over.set()
        await asyncio.wait_for(late[0], 30)

    over = asyncio.Event()
    answers: list[Any] = []
    samples, _ = play(run, by_turn("3", "4", "5"), after=after)
    assert samples[0].measured["turns"] == 1
    ((status, answer),) = answers
    assert (status, answer["error"]["code"]) == (410, "rollout_over")


def test_programs_that_block_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than a pool has threads, over an engine that waits until all have asked."""
    from openai import OpenAI

    from .agents import play_many

    monkeypatch.setattr(asyncio_utils, "_threads", DaemonExecutor(8, "call"))
    together = threading.Barrier(12, timeout=60)

    def run(task: Any, endpoint: Any) -> float:
        together.wait()
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as openai:
            reply = openai.chat.completions.create(model="policy", messages=task.messages)
        return float(reply.choices[0].message.content == "3")

    assert [s.outcome for s in play_many(run, by_turn("3"), 12)] == [{"reward": 1.0}] * 12
