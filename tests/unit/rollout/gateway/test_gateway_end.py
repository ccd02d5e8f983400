"""How the rollout of an agent program ends, and who may still call then."""

from __future__ import annotations

import asyncio
import threading
from typing import Any
from unittest.mock import AsyncMock

import pytest
from openai import APIStatusError

from rlcore.data.generation import Completion, GenerateRequest
from rlcore.errors import EngineFailed
from rollout import asyncio_utils
from rollout.daemon_threads import DaemonExecutor
from rollout.gateway.server import Gateway
from rollout.gateway.wire import Refused, read_request
from tests.unit.rollout.conversation.kit import (
    ScriptedModel,
    make_context,
    make_tokenizer,
)

from .agents import USER, body, by_turn, client, make_task, play, post


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
    asked = read_request(data, model="policy", held=session.held)
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
