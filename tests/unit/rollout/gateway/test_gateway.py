"""What agent programs get from the gateway, in which form, and what is trained of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import APIStatusError
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rlcore.data.generation import GenerateRequest
from rlcore.errors import ConfigError, UserError
from tests.unit.rollout.conversation.kit import KEEPS_THOUGHTS, STOP, ScriptedModel, make_tokenizer

from .agents import CALL, TOOLS, USER, body, by_turn, client, play, post, trained, turn

Edit = Callable[[dict[str, Any]], dict[str, Any]]


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
        choice = await turn(endpoint, messages)
        assert choice["finish_reason"] == "tool_calls"
        reply = choice["message"]
        assert (reply["content"], reply["reasoning_content"]) == (None, "hm")
        told = {**result(reply), "name": "add"}
        messages += [echo(dict(reply)), told]
        assert (await turn(endpoint, messages))["message"]["content"] == "It is 3."

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
        reply = (await turn(endpoint, messages))["message"]
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


def test_a_number_beyond_64_bits_reaches_the_program_and_comes_back() -> None:
    big = 123456789012345678901234567890

    async def run(task: Any, endpoint: Any) -> None:
        reply = (await turn(endpoint, task.messages))["message"]
        assert reply["tool_calls"][0]["function"]["arguments"] == f'{{"b":2,"a":{big}}}'
        await post(endpoint, body([*task.messages, reply, result(reply)]))
        await post(endpoint, body([USER, *task.messages, reply, result(reply)]))  # rendered anew

    samples, model = play(run, by_turn(CALL.replace('"a": 1', f'"a": {big}'), "3", "4"))
    assert len(samples) == 2
    assert f'"a": {big}' in model.tokenizer.decode(model.requests[2].prompt.tolist())


def test_a_call_has_the_model_s_own_id_unless_another_has_it() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        first = (await turn(endpoint, task.messages))["message"]
        assert first["tool_calls"][0]["id"] == "abc123DEF"
        messages = [*task.messages, first, result(first)]
        second = (await turn(endpoint, messages))["message"]
        assert second["tool_calls"][0]["id"] == "call00000"
        await post(endpoint, body([*messages, second, result(second)]))

    own = CALL.replace('{"name"', '{"id": "abc123DEF", "name"')
    samples, model = play(run, by_turn(own, own, "3"))
    assert trained(samples, model) == [f"{own}{STOP}|{own}{STOP}|3{STOP}"]


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


def test_a_program_without_tools_gets_all_that_the_model_wrote() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        choice = await turn(endpoint, task.messages, tools=None)
        assert (choice["message"]["content"], choice["finish_reason"]) == (f"So: {CALL}", "stop")
        assert "tool_calls" not in choice["message"]

    (sample,), _ = play(run, by_turn(f"So: {CALL}"))
    assert (sample.response_text, sample.measured["tool_calls"]) == (f"So: {CALL}", 0)


@pytest.mark.parametrize(
    "refused",
    [
        '<tool_call>{"name": "subtract", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": "one"}}</tool_call>',
    ],
)
def test_a_call_that_no_tool_takes_stays_in_the_text(refused: str) -> None:
    async def run(task: Any, endpoint: Any) -> None:
        choice = await turn(endpoint, list(task.messages))
        assert (choice["message"]["content"], choice["finish_reason"]) == (refused, "stop")
        assert "tool_calls" not in choice["message"]

    (sample,), _ = play(run, by_turn(refused))
    assert (sample.measured["tool_calls"], sample.measured["tool_errors"]) == (1, 1)
    assert len(sample.messages[-1]["tool_calls"]) == 1, "the record has it as a call"


def test_without_tool_choice_what_looks_like_a_call_is_text() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        messages = list(task.messages)
        reply = (await turn(endpoint, messages, tool_choice="none"))["message"]
        assert reply == {"role": "assistant", "content": CALL, "refusal": None}
        spoiled = (await turn(endpoint, [*messages, reply, USER]))["message"]
        assert spoiled["content"] == "<tool_call>{add 1}</tool_call>"

    (sample,), _ = play(run, by_turn(CALL, "<tool_call>{add 1}</tool_call>"))
    assert (sample.measured["tool_calls"], sample.measured["tool_errors"]) == (1, 1)


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
        choice = await turn(endpoint, messages, stop=["END"], max_tokens=4, reasoning_effort=None)
        assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "abcd")
        messages += [choice["message"], USER]
        choice = await turn(
            endpoint, messages, stop="END", max_tokens=300, max_completion_tokens=350
        )
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "It is ")
        messages += [choice["message"], USER]
        await post(endpoint, body(messages))

    samples, model = play(run, by_turn("abcdefgh", "It is END of it", "ok"))
    assert len(samples) == 1, "cut answers are known again"
    assert [r.sampling.stop for r in model.requests] == [("END",), ("END",), ()]
    assert [r.sampling.max_new_tokens for r in model.requests] == [4, 300, 400]


def test_the_name_of_a_model_is_that_of_a_policy() -> None:
    """A frozen policy of the run answers by its name, and nothing of it is trained."""

    async def run(task: Any, endpoint: Any) -> None:
        choice = await turn(endpoint, task.messages, model="earlier")
        messages = [*task.messages, choice["message"], USER]
        await turn(endpoint, messages)
        async with client(endpoint) as openai:
            models = [model.id async for model in await openai.models.list()]
            assert models == ["policy", "earlier"]
            assert (await openai.models.retrieve("earlier")).id == "earlier"
        status, answer = await post(endpoint, body(messages, model="later"))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "only 'policy', 'earlier'" in answer["error"]["message"]
        status, answer = await post(endpoint, body(messages, model=["policy"]))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")

    samples, model = play(run, by_turn("a draft", "an answer"), policies=("earlier",))
    assert [request.policy for request in model.requests] == ["earlier", None]
    [sample] = samples
    own = sample.tokens[sample.loss_mask == 1].tolist()
    assert model.tokenizer.decode(own) == "an answer" + STOP


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


def test_a_request_that_no_engine_takes_is_the_programs_fault_and_its_rollout_goes_on() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        status, answer = await post(endpoint, body(task.messages, stop=["no engine takes this"]))
        assert status == 400
        assert answer["error"]["message"] == "draw 3: it takes no such stop string"
        await post(endpoint, body(task.messages))

    def text(_: str, request: GenerateRequest) -> str:
        if "no engine takes this" in request.sampling.stop:
            raise UserError("draw 3: it takes no such stop string")
        return "3"

    samples, _ = play(run, text)
    assert len(samples) == 1


def test_a_wrong_configuration_is_not_the_programs_fault_and_ends_the_run() -> None:
    async def run(task: Any, endpoint: Any) -> None:
        status, answer = await post(endpoint, body(task.messages))
        assert status == 500
        assert "rollout.workflow.history: choose" in answer["error"]["message"]

    def text(_: str, request: GenerateRequest) -> str:
        raise ConfigError("rollout.workflow.history: choose")

    with pytest.raises(ConfigError, match="choose"):
        play(run, text)


def test_messages_that_the_template_refuses_are_the_programs_fault() -> None:
    template = "{%- if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}"

    async def run(task: Any, endpoint: Any) -> None:
        status, answer = await post(endpoint, body([{"role": "user", "content": "bad"}]))
        assert status == 400
        assert "the chat template refuses the messages: no" in answer["error"]["message"]
        await post(endpoint, body(task.messages))

    samples, _ = play(run, by_turn("3"), tokenizer=make_tokenizer(template + KEEPS_THOUGHTS))
    assert len(samples) == 1
