"""From messages to branches, without a server, and what is not kept of them."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from rlcore.errors import DataError
from rollout.conversation.conversation import Conversation
from rollout.conversation.tool_schemas import check_tools
from rollout.gateway.matching import Matcher, answered, key_of
from rollout.gateway.wire import Refused
from tests.unit.rollout.conversation.kit import ScriptedModel, make_context, make_tokenizer

from .agents import TOOLS, USER, make_task

SAID = {"role": "assistant", "content": "a"}
OTHER = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "Be short."}


def called(ident: str, arguments: Any = '{"a": 1, "b": 2}') -> dict[str, Any]:
    call = {"id": ident, "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def result(ident: str, content: Any = "3") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": ident, "content": content}


def grow(*requests: tuple[list[Any], list[Any]]) -> Conversation:
    """The conversation of a model that always says `a`, after requests of messages and tools."""
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, lambda *_: "a")
    base = make_context(tokenizer).conversation(make_task(tokenizer), 0, 0, model)

    async def ask() -> None:
        matcher = Matcher(base)
        for messages, tools in requests:
            state, point = await matcher.branch(messages, tools)
            await state.conversation.generate()
            answered(point, state, SAID)

    asyncio.run(ask())
    return base


@pytest.mark.parametrize(
    ("requests", "branches", "samples"),
    [
        ([([USER], []), ([USER, SAID, USER], [])], 0, 1),
        ([([USER, USER], []), ([USER, USER, SAID, USER], [])], 0, 1),
        ([([SYSTEM, USER], []), ([SYSTEM, USER, SAID, USER], [])], 0, 1),  # its own beginning
        ([([USER], TOOLS), ([USER, SAID, USER], TOOLS)], 0, 1),
        ([([USER], []), ([USER], [])], 1, 2),  # twice the same
        ([([SYSTEM], []), ([SYSTEM], [])], 1, 2),
        ([([USER], []), ([USER], TOOLS)], 1, 2),  # other tools
        ([([USER], []), ([USER, SAID, USER], []), ([USER, SAID, SYSTEM], [])], 1, 2),
        ([([USER], []), ([USER, OTHER, USER], [])], 1, 2),  # it said something else
        ([([USER], []), ([USER, SAID, USER, SAID, USER], [])], 0, 1),  # of which it said one
    ],
)
def test_only_what_does_not_go_on_is_a_branch(
    requests: list[tuple[list[Any], list[Any]]], branches: int, samples: int
) -> None:
    conversation = grow(*requests)
    assert conversation.branches == branches
    assert len(conversation.samples()) == samples


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (USER, {**USER, "x": None}, True),
        (USER, {**USER, "role": "system"}, False),
        (USER, {**USER, "name": "b"}, False),
        (result("1"), {**result("1"), "name": "add"}, True),
        (result("1"), result("2"), False),
        (result("1"), result("1", "4"), False),
        ({**SAID, "reasoning_content": "hm"}, SAID, True),
        (called("1", "{}"), called("1", {}), True),
        (called("1", "{"), called("1", "[}"), False),
        (result("1", ""), result("1", 0), False),
        ({"role": "assistant", "content": None}, {"role": "assistant", "tool_calls": []}, True),
    ],
)
def test_messages_that_say_the_same(one: Any, other: Any, same: bool) -> None:
    assert (key_of(one, {}) == key_of(other, {})) is same


@pytest.mark.parametrize(
    "message",
    [
        {"content": "a"},
        "a",
        {"role": "user", "content": {"a": 1}},
        {"role": "assistant", "tool_calls": [{"function": {}}]},
        {"role": "user", "content": [{"type": "image_url"}]},
        {"role": ["user"], "content": "a"},
    ],
)
def test_what_is_no_message_is_refused(message: Any) -> None:
    with pytest.raises((Refused, DataError)):
        key_of(message, {})


BIG = "123456789012345678901234567890"


@pytest.mark.parametrize(
    ("history", "turn"),
    [
        ([USER, called("one"), result("one"), SAID], 2),
        ([USER, called("two"), result("two"), SAID], 3),
        ([USER, called("else"), result("else"), SAID], 3),  # the latest
        ([USER, called("one", '{"b": 2.0, "a": 1e0}'), result("one"), SAID], 2),
        ([USER, called("one"), result("one"), {**SAID, "content": "hm\n</think>\n\na"}], 2),
        ([USER, called("one"), result("one"), {**SAID, "content": "<think>hm</think>a "}], 2),
        ([USER, called("one"), result("one"), {**SAID, "content": ["a"]}], 2),
        ([USER, called("one"), result("one"), {**SAID, "name": "bot"}], 2),
        ([USER, called("one", '{"a": 1, "b": 3}'), result("one"), SAID], None),
        ([USER, called("one"), result("one", "4"), SAID], None),
        ([USER, called("one"), result("two"), SAID], None),  # of no call
        ([USER, called("one"), result("one"), OTHER], None),
        ([USER, called("one", '{"a": ' + BIG + "}"), result("one"), SAID], None),
    ],
)
def test_a_history_goes_on_from_the_turn_that_said_it(
    history: list[dict[str, Any]], turn: int | None
) -> None:
    """Turns 0 and 1 make the same call; behind each its result, and the same answer."""
    tokenizer = make_tokenizer()
    model = ScriptedModel(tokenizer, lambda _, request: f"turn {request.turn}")
    base = make_context(tokenizer).conversation(make_task(tokenizer), 0, 0, model)

    async def ask() -> str:
        matcher = Matcher(base)
        for ident in ("one", "two"):
            state, point = await matcher.branch([USER], [])
            await state.conversation.generate()
            answered(point, state, called(ident))
        for ident in ("one", "two"):
            state, point = await matcher.branch([USER, called(ident), result(ident)], [])
            await state.conversation.generate()
            answered(point, state, SAID)
        state, _ = await matcher.branch([*history, USER], [])
        await state.conversation.generate()
        return str(tokenizer.decode(state.conversation.tokens.tolist()))

    text = asyncio.run(ask())
    said = [number for number in range(4) if f"turn {number}" in text]
    assert said == ([] if turn is None else [turn - 2, turn])


def match(number: int, size: int) -> None:
    arguments = f'{{"path": "{number}{"x" * size}"}}'
    call = {"id": "1", "function": {"name": "write", "arguments": arguments}}
    key_of({"role": "assistant", "tool_calls": [call]}, {})


def check(number: int, size: int) -> None:
    parameters = {"type": "object", "description": f"{number}{'x' * size}"}
    check_tools([{"type": "function", "function": {"name": "write", "parameters": parameters}}])


def name(number: int, size: int) -> None:
    check_tools([{"type": "function", "function": {"name": f"{number}{'x' * size}"}}])


@pytest.mark.parametrize("use", [match, check, name])
def test_what_a_request_holds_is_not_kept(use: Callable[[int, int], None]) -> None:
    use(-1, 1)
    tracemalloc.start()
    try:
        for number in range(24):
            use(number, 1 << 20)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak > 1 << 20
    assert kept < 1 << 20


def test_numbers_are_not_written_out_without_a_bound() -> None:
    arguments = "[" + "1e308," * 10_000 + "1]"
    call = {"id": "1", "function": {"name": "add", "arguments": arguments}}
    key = key_of({"role": "assistant", "tool_calls": [call]}, {})
    assert len(str(key)) < 3 * len(arguments)
