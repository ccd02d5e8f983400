"""What agent programs get from the gateway, and what is trained of what they do."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from openai import APIStatusError, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rlcore.data.generation import Completion, GenerateRequest
from rlcore.data.sample import Sample
from rlcore.errors import EngineFailed, RolloutFailed
from rollout import asyncio_utils
from rollout.daemon_threads import DaemonExecutor
from rollout.gateway.server import Gateway
from rollout.gateway.wire import Refused, read_request
from tests.unit.rollout.conversation.kit import (
    KEEPS_THOUGHTS,
    STOP,
    ScriptedModel,
    make_context,
    make_tokenizer,
)

from .agents import CALL, TOOLS, USER, by_turn, client, make_task, play

Edit = Callable[[dict[str, Any]], dict[str, Any]]


def body(messages: list[Any], **more: Any) -> bytes:
    return json.dumps({"model": "policy", "messages": messages, "tools": TOOLS, **more}).encode()


async def post(endpoint: Any, data: bytes, *, attempt: int | None = None) -> tuple[int, Any]:
    """Ask as a client that is not OpenAI's. Returns the status and the answer."""
    headers = {"Authorization": f"Bearer {endpoint.api_key}", "Content-Type": "application/json"}
    if attempt is not None:
        headers["x-stainless-retry-count"] = str(attempt)
    url = f"{endpoint.base_url}/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=data, headers=headers) as response,
    ):
        return response.status, await response.json()


def trained(samples: list[Sample], model: ScriptedModel) -> list[str]:
    """What is trained of each sample, by turn; all that the model wrote is trained once."""
    found = []
    numbers: list[float] = []
    for sample in samples:
        own = sample.tokens[sample.loss_mask == 1].tolist()
        found.append(
            "|".join(model.tokenizer.decode(own[s.start : s.end]) for s in sample.turn_spans)
        )
        numbers += (-sample.rollout_logprobs).tolist()
    assert sorted(numbers) == list(range(model.made))
    return found


def result(reply: Any, content: str = "3") -> dict[str, Any]:
    (call,) = reply["tool_calls"]
    return {"role": "tool", "tool_call_id": call["id"], "content": content}


# --- histories ------------------------------------------------------------------------------------


def respaced(message: dict[str, Any]) -> dict[str, Any]:
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] == '{"b":2,"a":1}'
    function = {"arguments": '{ "a": 1, "b": 2 }', "name": "add"}
    return {**message, "tool_calls": [{"function": function, "id": call["id"], "index": 0}]}


def without(*keys: str) -> Edit:
    return lambda message: {k: v for k, v in message.items() if k not in keys}


@pytest.mark.parametrize(
    "echo",
    [
        dict,
        without("content"),
        without("reasoning_content", "refusal"),
        lambda message: {**message, "content": "", "annotations": []},
        lambda message: {**message, "content": [{"type": "text", "text": ""}]},
        lambda message: {**message, "reasoning": message.pop("reasoning_content")},
        respaced,
    ],
)
def test_a_history_that_says_the_same_goes_on_token_by_token(echo: Edit) -> None:
    async def run(task: Any, endpoint: Any) -> None:
        messages = list(task.messages)
        _, answer = await post(endpoint, body(messages))
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "tool_calls"
        reply = choice["message"]
        assert (reply["content"], reply["reasoning_content"]) == (None, "hm")
        told = {**result(reply), "name": "add"}
        messages += [echo(dict(reply)), told]
        _, answer = await post(endpoint, body(messages))
        assert answer["choices"][0]["message"]["content"] == "It is 3."

    samples, model = play(run, by_turn(f"<think>hm</think>{CALL}", "It is 3."))
    assert trained(samples, model) == [f"<think>hm</think>{CALL}{STOP}|It is 3.{STOP}"]
    first, second = model.requests
    sent = model.tokenizer.decode(second.prompt.tolist())
    assert sent.startswith(
        model.tokenizer.decode(first.prompt.tolist()) + f"<think>hm</think>{CALL}"
    )
    assert samples[0].measured["turns"] == 2
    assert (samples[0].measured["tool_calls"], samples[0].measured["tool_errors"]) == (1, 0)


def test_rewritten_results_and_answers_are_branches() -> None:
    async def run(task: Any, endpoint: Any) -> dict[str, float]:
        messages = list(task.messages)
        _, answer = await post(endpoint, body(messages))
        reply = answer["choices"][0]["message"]
        await post(endpoint, body([*messages, reply, result(reply)]))
        await post(endpoint, body([*messages, reply, result(reply, "4")]))  # another result
        mine = {"role": "assistant", "content": "Let me see."}
        await post(endpoint, body([*messages, mine, USER]))  # it never said so
        return {"right": 1.0, "speed": 0.5}

    samples, model = play(run, by_turn(CALL, "It is 3.", "It is 4.", "Well."))
    assert trained(samples, model) == [
        f"{CALL}{STOP}|It is 3.{STOP}",
        f"It is 4.{STOP}",
        f"Well.{STOP}",
    ]
    rendered = model.tokenizer.decode(model.requests[3].prompt.tolist())
    assert rendered.endswith(
        f"assistant\nLet me see.{STOP}\n<|im_start|>user\n1+2?{STOP}\n<|im_start|>assistant\n"
    )
    assert [s.outcome for s in samples] == [{"right": 1.0, "speed": 0.5}] * 3
    assert len({s.rollout_id for s in samples}) == 1


def test_an_agent_may_begin_with_messages_and_tools_of_its_own() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        assert (task.row, task.tools) == ({"label": "3", "level": 7}, [])
        system = {"role": "system", "content": "Be short."}
        async with client(endpoint) as openai:
            messages: list[Any] = [system, USER]
            for _ in range(2):
                reply = await openai.chat.completions.create(model="policy", messages=messages)
                messages += [reply.choices[0].message, USER]

    samples, model = play(run, by_turn("3", "3!"))
    assert trained(samples, model) == [f"3{STOP}|3!{STOP}"]
    assert samples[0].messages[0]["content"] == "Be short."


def test_turns_that_say_the_same_with_other_thoughts_are_told_apart() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        messages = list(task.messages)
        both = await asyncio.gather(*(post(endpoint, body(messages)) for _ in range(2)))
        replies = {a["choices"][0]["message"]["reasoning_content"]: a for _, a in both}
        reply = replies["two"]["choices"][0]["message"]
        await post(endpoint, body([*messages, reply, USER]))

    script = by_turn("<think>one</think>3", "<think>two</think>3", "3!")
    samples, model = play(run, script)
    assert trained(samples, model) == [
        f"<think>one</think>3{STOP}",
        f"<think>two</think>3{STOP}|3!{STOP}",
    ]


def test_without_tool_choice_what_looks_like_a_call_is_text() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        messages = list(task.messages)
        _, answer = await post(endpoint, body(messages, tool_choice="none"))
        reply = answer["choices"][0]["message"]
        assert reply == {"role": "assistant", "content": CALL, "refusal": None}
        _, answer = await post(endpoint, body([*messages, reply, USER]))
        spoiled = answer["choices"][0]["message"]
        assert spoiled["content"] == "<tool_call>{add 1}</tool_call>"

    (sample,), _ = play(run, by_turn(CALL, "<tool_call>{add 1}</tool_call>"))
    assert (sample.measured["tool_calls"], sample.measured["tool_errors"]) == (1, 1)


# --- repeated, simultaneous and abandoned calls ---------------------------------------------------


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


# --- the end of a rollout -------------------------------------------------------------------------


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

    def broken(model: ScriptedModel) -> Any:
        async def generate(request: GenerateRequest) -> list[Completion]:
            raise EngineFailed("engine-0 died")

        return generate

    async def after() -> None:
        failed = await asyncio.wait_for(asked[0], 30)
        assert ended, "it was cancelled, not waited for"
        assert (failed.status_code, failed.response.headers["x-should-retry"]) == (500, "false")

    with pytest.raises(EngineFailed, match="engine-0 died"):
        play(run, by_turn("3"), model=broken, after=after)
    assert not went_on


def test_an_abandoned_turn_that_is_lost_voids_the_rollout() -> None:
    async def run(task: Any, endpoint: Any) -> float:
        await post(endpoint, body(task.messages))
        call = asyncio.ensure_future(post(endpoint, body([*task.messages, USER])))
        await asyncio.wait({call}, timeout=0.2)
        call.cancel()
        return 1.0

    def broken(model: ScriptedModel) -> Any:
        async def generate(request: GenerateRequest) -> list[Completion]:
            if request.turn:
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


def test_a_call_that_comes_in_while_the_rollout_ends_is_refused() -> None:
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, by_turn("3"))

    async def late() -> None:
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

    asyncio.run(late())
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


# --- budgets, stops, forms ------------------------------------------------------------------------


def test_where_a_budget_leaves_nothing_the_answer_is_empty() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        messages = list(task.messages)
        for expected in (("stop", "3"), ("length", "")):
            _, answer = await post(endpoint, body(messages))
            (choice,) = answer["choices"]
            assert (choice["finish_reason"], choice["message"]["content"]) == expected
            messages += [choice["message"], USER]
        assert answer["usage"]["completion_tokens"] == 0

    samples, _ = play(run, by_turn("3"), workflow={"max_turns": 1})
    assert [s.finish_reason for s in samples] == ["turns"]


def test_stops_and_limits_of_a_call() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        messages = list(task.messages)
        _, answer = await post(
            endpoint, body(messages, stop=["END"], max_tokens=4, reasoning_effort=None)
        )
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "abcd")
        messages += [choice["message"], USER]
        _, answer = await post(
            endpoint, body(messages, stop="END", max_tokens=300, max_completion_tokens=350)
        )
        (choice,) = answer["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "It is ")
        messages += [choice["message"], USER]
        await post(endpoint, body(messages))

    samples, model = play(run, by_turn("abcdefgh", "It is END of it", "ok"))
    assert len(samples) == 1, "cut answers are known again"
    assert [r.sampling.stop for r in model.requests] == [("END",), ("END",), ()]
    assert [r.sampling.max_new_tokens for r in model.requests] == [4, 300, 400]


@pytest.mark.parametrize("usage", [True, False])
def test_answers_are_whole_objects_of_openai(usage: bool) -> None:
    async def run(task: Any, endpoint: Any) -> None:
        asked = body(task.messages, logprobs=True, return_token_ids=True)
        _, answer = await post(endpoint, asked)
        whole = ChatCompletion.model_validate(answer)
        made = model_of[0].tokenizer(f"{CALL}{STOP}", add_special_tokens=False)["input_ids"]
        assert answer["choices"][0]["token_ids"] == made
        assert answer["prompt_token_ids"] == model_of[0].requests[0].prompt.tolist()
        assert whole.usage.prompt_tokens == len(answer["prompt_token_ids"])
        told = whole.choices[0].logprobs.content
        assert "".join(token.token for token in told) == f"{CALL}{STOP}"
        assert [-token.logprob for token in told] == list(range(len(made)))
        async with client(endpoint) as openai:
            models = [model.id async for model in await openai.models.list()]
            assert models == [endpoint.model]
            assert (await openai.models.retrieve("policy")).id == "policy"
            more = {"stream_options": {"include_usage": True}} if usage else {}
            stream = await openai.chat.completions.create(
                model="policy", messages=task.messages, tools=TOOLS, stream=True, **more
            )
            chunks = [chunk async for chunk in stream]
            for chunk in chunks:
                ChatCompletionChunk.model_validate(chunk.model_dump(exclude_unset=True))
        assert [c.choices[0].finish_reason for c in chunks[:2]] == [None, "tool_calls"]
        call = chunks[0].choices[0].delta.tool_calls[0]
        assert (call.index, call.function.name) == (0, "add")
        assert len(chunks) == 2 + usage
        if usage:
            assert chunks[2].usage.completion_tokens == len(made)

    model_of: list[ScriptedModel] = []

    def remember(model: ScriptedModel) -> ScriptedModel:
        model_of.append(model)
        return model

    play(run, by_turn(CALL, CALL), model=remember)


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"temperature": 0.2}, "temperature", "got 0.2, but the run has 1.0"),
        ({"top_p": 0.9}, "top_p", "the run has 1.0"),
        ({"seed": 3}, "seed", "the run sets its own"),
        ({"n": 2}, "n", "the run has 1"),
        ({"tool_choice": "required"}, "tool_choice", '"auto" or "none"'),
        ({"response_format": {"type": "json_object"}}, "response_format", "text"),
        ({"min_tokens": 4}, "min_tokens", "does not know the key"),
        ({"model": "gpt-7"}, "model", "only 'policy'"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": [{"content": "a"}]}, "messages", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image"),
        ({"messages": [USER, {"role": "assistant", "content": "a"}]}, "messages", "assistant's"),
        ({"tools": [{"name": "f"}]}, "tools", "function"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"stop": [3]}, "stop", "a text"),
        ({"stream": 1}, "stream", "true or false"),
    ],
)
def test_what_the_run_does_not_do_is_refused_by_its_key(
    change: dict[str, Any], param: str, said: str
) -> None:
    async def run(task: Any, endpoint: Any) -> None:
        given = {"model": "policy", "messages": task.messages, **change}
        status, answer = await post(endpoint, json.dumps(given).encode())
        assert status == (404 if param == "model" else 400)
        error = answer["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert said in error["message"]
        held = {"temperature": 1.0, "top_p": 1, "n": 1, "user": "me", "seed": None, "store": False}
        status, _ = await post(endpoint, body(task.messages, **held))
        assert status == 200

    samples, _ = play(run, by_turn("3"))
    assert len(samples) == 1


def test_other_paths_and_bodies_are_refused() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        status, answer = await post(endpoint, b"{")
        assert (status, "not JSON" in answer["error"]["message"]) == (400, True)
        async with client(endpoint) as openai:
            with pytest.raises(APIStatusError, match="no /v1/responses here") as refused:
                await openai.responses.create(model="policy", input="hi")
            assert refused.value.status_code == 404
        await post(endpoint, body(task.messages))

    play(run, by_turn("3"))


def test_messages_that_the_template_refuses_are_the_programs_fault() -> None:
    template = "{%- if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"

    async def run(task: Any, endpoint: Any) -> None:
        status, answer = await post(endpoint, body([{"role": "user", "content": "bad"}]))
        assert status == 400
        assert "the chat template refuses the messages: no" in answer["error"]["message"]
        await post(endpoint, body(task.messages))

    samples, _ = play(run, by_turn("3"), tokenizer=make_tokenizer(template + KEEPS_THOUGHTS))
    assert len(samples) == 1
