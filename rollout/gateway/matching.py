r"""Maps the messages of a request to the branch of the rollout that they continue.

Programs send their whole history with each request. The history is compared with earlier requests
and answers, message by message:

    user "2+3?" -> assistant add(2, 3) -> tool "5" -> assistant "5"
                                      \-> tool "6" -> assistant "6"       another branch

A message is identified by its meaning. An echoed answer may spell the same JSON differently, have
empty or no content, an `index`, other ids or no reasoning. Among equal turns the one whose ids are
echoed continues, otherwise the latest.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson

from rlcore.data.messages import Message, check_messages
from rollout.conversation.conversation import Conversation
from rollout.conversation.formats import THINK
from rollout.gateway.wire import Refused

REASONING = ("reasoning_content", "reasoning")  # message keys that hold reasoning
_WRITTEN_OUT = 1e30


@dataclass(slots=True)
class State:
    """A branch just before its first turn, or just after a turn."""

    conversation: Conversation
    reasoning: str | None = None  # reasoning of that turn
    ids: tuple[str, ...] = ()  # ids of all calls so far, as sent to the program


@dataclass(slots=True)
class Point:
    """A position in the history, and the branches that have reached it."""

    states: tuple[State, ...] = ()  # more than one if turns are equal
    following: dict[Hashable, Point] = field(default_factory=dict)

    def behind(self, message: Message, places: Mapping[str, int] | None = None) -> Point:
        """The point after `message`; for `places` see `key_of`."""
        return self.following.setdefault(key_of(message, places or {}), Point())


class Matcher:
    """The history of a rollout, by message, from the conversation as the row begins it."""

    def __init__(self, conversation: Conversation) -> None:
        self._base = conversation
        # by the tools of the request
        self._roots: dict[bytes, Point] = {}
        point = self._root(conversation.tools)
        places: dict[str, int] = {}
        for message in conversation.messages:
            point = point.behind(message, places)
            places = _places(message) or places
        point.states += (State(conversation),)

    async def branch(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[State, Point]:
        """A branch that ends in `messages`, ready for the model's turn, and their point.

        Raises:
            Refused: messages of the wrong form, or the last message is the model's own.
            UserError: see `Conversation.append`.
        """
        point = self._root(tools)
        found: tuple[int, Point] | None = None
        places: dict[str, int] = {}
        for place, message in enumerate(messages):
            point = point.behind(message, places)
            places = _places(message) or places
            if point.states:
                found = (place, point)
        if messages[-1]["role"] == "assistant":
            raise Refused(
                400,
                "messages: the last one is the assistant's, which cannot be continued; end with"
                " a message of another role",
                param="messages",
            )
        if found is not None:
            place, at = found
            rest = messages[place + 1 :]
            if all(message["role"] != "assistant" for message in rest):
                state = _fitting(at.states, messages[: place + 1])
                conversation = state.conversation.fork()
                await conversation.append(rest)
                return State(conversation, ids=state.ids), point
        # The history is new, or the program has rewritten the model's text. Restore the content of
        # an answer that was echoed without its empty content.
        whole = [
            {**m, "content": ""}
            if m["role"] == "assistant" and not m.get("content") and not m.get("tool_calls")
            else m
            for m in messages
        ]
        conversation = self._base.fork(whole, tools=tools)
        point.states += (State(conversation.fork()),)
        return State(conversation), point

    def _root(self, tools: Sequence[dict[str, Any]]) -> Point:
        key = orjson.dumps([*tools], option=orjson.OPT_SORT_KEYS) if tools else b""
        return self._roots.setdefault(key, Point())


def answered(point: Point, before: State, message: Message) -> None:
    """Record that the branch `before` has made a turn, which the program knows as `message`."""
    ids = (*before.ids, *_places(message))
    point.behind(message).states += (State(before.conversation, _reasoning(message), ids),)


def _fitting(states: Sequence[State], messages: Sequence[Message]) -> State:
    """The state whose ids are echoed, then whose reasoning is quoted, then the latest."""
    if len(states) == 1:
        return states[0]
    echoed = {ident for message in messages for ident in _places(message)}
    reasoning = _reasoning(messages[-1])

    def fit(numbered: tuple[int, State]) -> tuple[int, bool, int]:
        number, state = numbered
        quoted = reasoning is not None and state.reasoning == reasoning
        return sum(ident in echoed for ident in state.ids), quoted, number

    return max(enumerate(states), key=fit)[1]


def _places(message: Message) -> dict[str, int]:
    """The index of each call in a message, by its id."""
    calls = message.get("tool_calls") or ()
    return {str(call.get("id")): place for place, call in enumerate(calls)}


def _reasoning(message: Message) -> str | None:
    """The reasoning of an answer, which may precede its content."""
    found = next((message[key] for key in REASONING if message.get(key)), None)
    if found is None and message["role"] == "assistant":
        found = _text(message).rpartition(THINK[1])[0].strip().removeprefix(THINK[0])
    return str(found).strip() or None


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else part["text"] for part in content)
    return "" if content is None else content


def key_of(message: Message, places: Mapping[str, int]) -> Hashable:
    """A key that messages of equal meaning share.

    Args:
        places: index of each answerable call, by its id, which programs may rename.

    Raises:
        Refused: it is not a message.
    """
    try:
        role = message["role"]
        content = _text(message)
        key: Hashable
        if role == "assistant":
            content = content.rpartition(THINK[1])[2].strip()
            key = (role, content, *[_call(call) for call in message.get("tool_calls") or ()])
        elif role == "tool":
            ident = str(message.get("tool_call_id"))
            key = (role, content, places.get(ident, ident))
        else:
            key = (role, content, message.get("name"))
        hash(key)
    except (KeyError, TypeError, AttributeError) as error:
        check_messages("the request", "messages", [message])
        raise Refused(
            400, f"messages: cannot read {str(message)[:200]}", param="messages"
        ) from error
    return key


def _call(call: Any) -> Hashable:
    """The name and the arguments of a call, as canonical JSON if they are JSON."""
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments)
    with suppress(ValueError, RecursionError):
        arguments = json.dumps(json.loads(arguments, parse_float=_number), sort_keys=True)
    return function["name"], arguments


def _number(digits: str) -> float:
    """A number; whole numbers become integers, as JavaScript writes them without a fraction."""
    number = float(digits)
    # the digits of 1e308 would be 60 times as long as the text
    return int(number) if number.is_integer() and abs(number) < _WRITTEN_OUT else number
