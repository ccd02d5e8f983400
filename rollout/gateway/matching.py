r"""From the messages of a request to the branch of the rollout that they continue.

Programs send their whole history with each request. It is compared with what was sent and answered
before, message by message:

    user "2+3?" -> assistant add(2, 3) -> tool "5" -> assistant "5"
                                      \-> tool "6" -> assistant "6"       another branch

A message is known by what it says. Whether it echoes an answer in other words for the same JSON,
with an empty or no content, with an `index` or without its reasoning, makes no difference.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from rlcore.data.messages import Message, check_messages
from rollout.conversation.conversation import Conversation
from rollout.gateway.wire import Refused

REASONING = ("reasoning_content", "reasoning")  # keys of messages


@dataclass(slots=True)
class State:
    """A branch as it stood before its first turn, or just behind a turn."""

    conversation: Conversation
    reasoning: str | None = None  # of that turn


@dataclass(slots=True)
class Point:
    """What was said up to a message, and the branches that stood there."""

    states: tuple[State, ...] = ()  # more than one if turns say the same
    following: dict[Hashable, Point] = field(default_factory=dict)

    def behind(self, message: Message) -> Point:
        """Return the point behind `message`, from this one."""
        key = key_of(message)
        point = self.following.get(key)
        if point is None:
            point = self.following[key] = Point()
        return point

    def note(self, state: State) -> None:
        """Note that a branch stood here."""
        self.states += (state,)


class Matcher:
    """Knows all that was said in a rollout.

    Args:
        conversation: as the row begins it.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._base = conversation
        self._roots: dict[bytes, Point] = {}  # by the tools that the model was told of
        point = self._root(conversation.tools)
        for message in conversation.messages:
            point = point.behind(message)
        point.note(State(conversation))

    async def branch(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[Conversation, Point]:
        """Return a branch that holds `messages`, ready for the model's turn, and their point.

        Raises:
            Refused: messages of the wrong form, or ones that end in the model's own.
            UserError: see `Conversation.append`.
        """
        point = self._root(tools)
        found: tuple[int, Point] | None = None
        for place, message in enumerate(messages):
            point = point.behind(message)
            if point.states:
                found = (place, point)
        if messages[-1]["role"] == "assistant":
            raise Refused(
                400,
                "messages: the last one is the assistant's, which is not continued; end with a"
                " message of another role",
                param="messages",
            )
        if found is not None:
            place, at = found
            rest = messages[place + 1 :]
            if all(message["role"] != "assistant" for message in rest):
                conversation = _fitting(at.states, messages[place]).conversation.fork()
                await conversation.append(rest)
                return conversation, point
        # nothing was sent that begins so, or the program has rewritten what the model said
        conversation = self._base.fork([_with_content(m) for m in messages], tools=tools)
        point.note(State(conversation.fork()))
        return conversation, point

    def _root(self, tools: Sequence[dict[str, Any]]) -> Point:
        key = orjson.dumps([*tools], option=orjson.OPT_SORT_KEYS) if tools else b""
        return self._roots.setdefault(key, Point())


def answered(point: Point, conversation: Conversation, message: Message) -> None:
    """Note that a branch stands behind a turn, which the program knows as `message`."""
    point.behind(message).note(State(conversation, _reasoning(message)))


def _fitting(states: Sequence[State], message: Message) -> State:
    """Return the state whose reasoning the message quotes; else the first."""
    if len(states) > 1 and (reasoning := _reasoning(message)):
        return next((state for state in states if state.reasoning == reasoning), states[0])
    return states[0]


def _with_content(message: Message) -> Message:
    """Return an answer that was echoed without its empty content as it was."""
    if message["role"] != "assistant" or message.get("content") or message.get("tool_calls"):
        return message
    return {**message, "content": ""}


def _reasoning(message: Message) -> str | None:
    return next((message[key] for key in REASONING if message.get(key)), None)


def key_of(message: Message) -> Hashable:
    """Return what two messages have in common that say the same.

    Raises:
        Refused: it is not a message.
    """
    try:
        role = message["role"]
        content = message.get("content")
        if content is None:
            content = ""
        if isinstance(content, list):
            content = "".join(part if isinstance(part, str) else part["text"] for part in content)
        key: Hashable
        if role == "assistant":
            key = (role, content, *[_call(call) for call in message.get("tool_calls") or ()])
        elif role == "tool":
            key = (role, content, message.get("tool_call_id"))
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
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        arguments = orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS).decode()
    return function["name"], _canonical(arguments)


@lru_cache(maxsize=4096)
def _canonical(arguments: str) -> str:
    """Return JSON with sorted keys and no spaces; what is no JSON stays as it is."""
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONDecodeError:
        return arguments
