"""Parses the text of a turn into a message: reasoning, tool calls, and the remaining text.

A call is run only if every character of it is understood and its arguments fit the tool's schema.
Any other call carries an error, which the model reads as the result of the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from rlcore.data.messages import Message, parse_json
from rlcore.errors import ConfigError
from rollout.conversation.formats import FORMATS
from rollout.conversation.reply import Reply, ToolCall, Turn
from rollout.conversation.tool_schemas import call_error, parse_python, typed
from rollout.conversation.turn_reader import TemplateReader, TurnReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "rollout.tool_parser"
DEFAULT = "hermes"  # format if the chat template shows no calls


class ReplyParser:
    """Reads the turns of one model.

    Args:
        tokenizer: its own response template takes precedence over its chat template's format.
        name: name of a format of `FORMATS` to use instead.
        head: text that the chat template writes at the head of a turn; it may open the reasoning.

    Raises:
        ConfigError: the format is unknown.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, name: str = "auto", *, head: str = ""
    ) -> None:
        if name != "auto" and name not in FORMATS:
            known = ", ".join(["auto", *FORMATS])
            raise ConfigError(f"{KEY}: {name!r} is unknown (known: {known})")
        own = getattr(tokenizer, "response_template", None) if name == "auto" else None
        self._own = TemplateReader(own) if own else None
        # reading a turn by such a template needs the end of the text that the model was sent
        self.reads_sent = self._own is not None
        template = str(tokenizer.chat_template or "")
        # the first format whose marks the chat template shows
        shown = (of for of, form in FORMATS.items() if all(m in template for m in form.marks))
        self.format = name if name != "auto" else next(shown, DEFAULT)
        self._reader = TurnReader(FORMATS[self.format])
        opened = re.search(FORMATS[self.format].thought[0], head)
        self._head = head[opened.start() :] if opened else ""

    def __call__(self, sent: str, text: str, tools: Sequence[dict[str, Any]]) -> Reply:
        """Read a turn; the reply has no finish reason and no budget yet.

        Args:
            sent: end of the text that the model was sent, for a tokenizer's own response template.
            text: the model's text, including special tokens but not the stop token.
            tools: the callable tools. Without any, everything that looks like a call is text.

        Raises DataError if a tool has an invalid schema.
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


def as_json(value: Any) -> str:
    """Encode as JSON that every program can read.

    Raises:
        ValueError: the value has half a surrogate pair, or is nested too deep.
    """
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        # whole numbers beyond 64 bits are valid
        pass
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        orjson.dumps(json.loads(text, parse_int=float))
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    return text


def _checked(number: int, call: ToolCall, tools: Sequence[dict[str, Any]]) -> ToolCall:
    """The call with its id and typed arguments, or with an error."""
    call = replace(call, id=call.own_id or f"call{number:05d}")
    if (arguments := call.arguments) is not None:
        try:
            if call.as_texts:
                read = parse_python if call.as_texts == "python" else parse_json
                arguments = typed(call.name, arguments, tools, read)
            as_json([call.name, arguments])
            message = call_error(call.name, arguments, tools)
            return replace(call, arguments=arguments, error=message)
        except ValueError as error:
            message = f"a call must be JSON that can be written again: {error}"
            call = replace(call, arguments=None, error=message)
    # replace half of a surrogate pair, which cannot be encoded
    return replace(call, name=call.name.encode(errors="replace").decode())
