"""From the text of a turn to a message: its reasoning, its calls of tools, and what is left.

A call is run only if every character of it is understood and its arguments fit the tool's schema.
Any other is a call with a problem, which the model reads as the result of the call.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from rlcore.data.messages import Message
from rlcore.errors import ConfigError
from rollout.conversation.formats import FORMATS, THINK
from rollout.conversation.reading import TemplateReader, TurnReader
from rollout.conversation.reply import Reply, ToolCall, Turn
from rollout.conversation.tool_schemas import problem_of, typed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "rollout.tool_parser"
DEFAULT = "hermes"  # for a chat template that shows no calls


class ReplyParser:
    """Reads the turns of one model.

    Args:
        tokenizer: its own response template counts first, then the format of its chat template.
        name: a format of `FORMATS` instead.
        head: what the chat template writes at the head of a turn; it may open the reasoning.

    Raises:
        ConfigError: there is no such format.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, name: str = "auto", *, head: str = ""
    ) -> None:
        if name != "auto" and name not in FORMATS:
            known = ", ".join(["auto", *FORMATS])
            raise ConfigError(f"{KEY}: {name!r} is unknown (known: {known})")
        own = getattr(tokenizer, "response_template", None) if name == "auto" else None
        self._own = TemplateReader(own) if own else None
        self.format = name if name != "auto" else format_of(tokenizer)
        self._reader = TurnReader(FORMATS[self.format])
        _, opening, rest = head.partition(THINK[0])
        self._head = opening + rest

    @property
    def reads_sent(self) -> bool:
        """Whether a turn cannot be read without the end of what the model was sent."""
        return self._own is not None

    def __call__(self, sent: str, text: str, tools: Sequence[dict[str, Any]]) -> Reply:
        """Read a turn.

        Args:
            sent: the end of what the model was sent, for a template of the tokenizer's own.
            text: what it wrote, special tokens included but for the stop token.
            tools: what may be called. Without any, what looks like a call is text.

        Returns:
            A reply without finish reason and budget.

        Raises:
            DataError: the schema of a tool is none.
        """
        if self._own is not None:
            turn = self._own(sent, text, calls=bool(tools))
        else:
            turn = self._reader(self._head + text, calls=bool(tools))
        return _reply(text, turn, tools)


def _reply(text: str, turn: Turn, tools: Sequence[dict[str, Any]]) -> Reply:
    content = "\n".join(part.strip() for part in turn.said if part.strip())
    reasoning = "\n".join(part.strip() for part in turn.thought if part.strip())
    calls = tuple(_checked(i, call, tools) for i, call in enumerate(turn.calls))
    message: Message = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if readable := [call for call in calls if call.arguments is not None]:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in readable
        ]
    return Reply(content, reasoning, calls, "stop", 0, raw=text, message=message)


def format_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of the format that the chat template shows."""
    template = str(tokenizer.chat_template or "")
    found = (name for name, form in FORMATS.items() if all(m in template for m in form.marks))
    return next(found, DEFAULT)


def as_json(value: Any) -> str:
    """Return JSON that every program can read.

    Raises:
        ValueError: half a surrogate pair, or nested too deep.
    """
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        pass  # whole numbers beyond 64 bits are fine
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        orjson.dumps(json.loads(text, parse_int=float))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return text


def _checked(number: int, call: ToolCall, tools: Sequence[dict[str, Any]]) -> ToolCall:
    """Return a call with its id and typed arguments, or with the problem that it has."""
    call = replace(call, id=f"call{number:05d}")
    if (arguments := call.arguments) is not None:
        try:
            if call.as_texts:
                arguments = typed(call.name, arguments, tools)
            as_json([call.name, arguments])
            problem = problem_of(call.name, arguments, tools)
            return replace(call, arguments=arguments, problem=problem)
        except ValueError as error:
            problem = f"a call must be JSON that can be written again: {error}"
            call = replace(call, arguments=None, problem=problem)
    # half of a surrogate pair, which nothing can write
    return replace(call, name=call.name.encode(errors="replace").decode())
