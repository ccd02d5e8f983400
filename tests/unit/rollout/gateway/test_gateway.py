"""What agent programs get from the gateway, and what is trained of what they do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.rollout.conversation.kit import (
    STOP,
)

from .agents import CALL, USER, body, by_turn, client, play, post, trained, turn

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
