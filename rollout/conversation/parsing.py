"""From the text of a turn to a message: its reasoning, its calls of tools, and what is left.

transformers' response templates do the work. A tokenizer may bring its own; `formats` has those
that many models share.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from rlcore.data.messages import Message
from rlcore.errors import ConfigError
from rollout.conversation.formats import FINAL, FORMATS, MORE_CALLS, REASONING
from rollout.conversation.regions import RegionReader
from rollout.conversation.reply import Reply, ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "rollout.tool_parser"
DEFAULT = "hermes"  # for a chat template that shows no calls
_CALLS = ("tool_calls", *MORE_CALLS)  # fields of a response template


class ReplyParser:
    """Reads the turns of one model.

    Args:
        tokenizer: its own response template counts first, then its chat template tells the format.
        name: a format of `FORMATS` instead.
        head: what the chat template writes at the head of a turn; it may open the reasoning.

    Raises:
        ConfigError: there is no such format.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, name: str = "auto", *, head: str = ""
    ) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        if name != "auto" and name not in FORMATS:
            known = ", ".join(["auto", *FORMATS])
            raise ConfigError(f"{KEY}: {name!r} is unknown (known: {known})")
        self._own = getattr(tokenizer, "response_template", None) if name == "auto" else None
        self.format = name if name != "auto" else told_by(tokenizer)
        # checked and compiled once, not turn by turn
        self.template = load_response_template(self._own or FORMATS[self.format].template)
        _, opening, rest = head.partition(REASONING["open"])
        self._head = opening + rest
        fields = {n: field for n, field in self.template.fields.items() if n not in _CALLS}
        self._without_calls = replace(self.template, fields=fields)
        # a template of the tokenizer's own may have what this reader does not know
        self._regions = None if self._own else RegionReader(self.template)
        self._regions_without_calls = None if self._own else RegionReader(self._without_calls)

    @property
    def reads_sent(self) -> bool:
        """Whether a turn cannot be read without the end of what the model was sent."""
        return self._own is not None

    def __call__(self, sent: str, text: str, tools: Sequence[dict[str, Any]]) -> Reply:
        """Read a turn.

        Args:
            sent: the end of what the model was sent, for a template of the tokenizer's own.
            text: what it wrote, special tokens included but for the stop token.
            tools: their schemas tell the types of arguments. Without any, what looks like a call
                is text.

        Returns:
            A reply without finish reason and budget. What does not parse is text, or a call with a
            `problem`.
        """
        try:
            found = self._fields(sent, text, tools)
        except (ValueError, RecursionError):  # a region is not what it says: all of it is text
            found = {"content": text}
        parts = [str(found[name]).strip() for name in ("content", FINAL) if found.get(name)]
        content = "\n".join(part for part in parts if part)
        reasoning = str(found.get("reasoning_content") or "")
        calls = tuple(_call(i, call) for i, call in enumerate(_calls_in(found)))
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

    def _fields(self, sent: str, text: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of the response template.

        Raises:
            ValueError: a region is not what it says.
            RecursionError: one is nested too deep.
        """
        regions = self._regions if tools else self._regions_without_calls
        if regions is not None:
            return regions(self._head + text, tools)
        from transformers.utils.chat_parsing import ResponseParser

        template = self.template if tools else self._without_calls
        parser = ResponseParser(template, prefix=sent, tools=[*tools] or None)
        # `feed` would look for what later text may still change, and there is none
        parser._buffer += text
        found: dict[str, Any]
        found, _ = parser.finalize()
        return found


def told_by(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the name of the format that the chat template shows."""
    template = str(tokenizer.chat_template or "")
    found = (name for name, form in FORMATS.items() if all(m in template for m in form.marks))
    return next(found, DEFAULT)


def _calls_in(found: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the calls of a parsed response: one by one, or as a list in JSON."""
    for name in _CALLS:
        if value := found.get(name):
            yield from [value] if isinstance(value, str | dict) else value


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


def _call(number: int, call: Any) -> ToolCall:
    """Return one call; ids count the calls of the reply."""
    function = call.get("function", call) if isinstance(call, dict) else call
    name = function.get("name") if isinstance(function, dict) else None
    arguments = None
    if isinstance(function, dict):
        arguments = function.get("arguments", function.get("parameters", {}))
    ident = f"call{number:05d}"
    raw = ""
    try:
        raw = function if isinstance(function, str) else as_json(function)
        if isinstance(arguments, str):  # some models write JSON in a text
            orjson.loads(arguments)  # which takes no NaN, but rounds numbers beyond 64 bits
            arguments = json.loads(arguments)
            as_json(arguments)
    except (ValueError, RecursionError):
        arguments = None
        name = name if raw else ""  # it may be what cannot be told
    if not isinstance(name, str) or not isinstance(arguments, dict):
        problem = 'a call must be JSON: {"name": text, "arguments": {...}}'
        return ToolCall(ident, name if isinstance(name, str) else "", None, problem, raw)
    return ToolCall(ident, name.strip(), arguments, "", raw)
