"""Chat messages as rows have them, converted to the form that chat templates expect.

The JSON of a call's arguments must be unambiguous: no duplicate key, no NaN or infinity, and no
number that would be read as another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import orjson

from rlcore.config.sections.data import DataConfig
from rlcore.data.rows import shorten
from rlcore.errors import DataError

# {"role": ..., "content": text, or None next to "tool_calls", ...}
Message = dict[str, Any]


def check_messages(where: str, key: str, messages: Sequence[Any]) -> list[Message]:
    """Return the messages with text contents, and with the arguments of tool calls as maps.

    Raises:
        DataError: a message without a role, with a content that is not text, or with neither
            content nor tool calls; a call whose arguments are not a map.
    """
    return [_message(f"{where}: message {i} of {key!r}", m) for i, m in enumerate(messages, 1)]


def _message(what: str, message: Any) -> Message:
    # Parquet fills every field of the column in each message: a null field was never there.
    given = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    if not isinstance(given.get("role"), str):
        raise DataError(
            f"{what}: each message must be {{role: text, content: text}}; got {shorten(message)}"
        )
    if calls := given.pop("tool_calls", None):
        if not isinstance(calls, list):
            raise DataError(f"{what}: tool_calls must be a list; got {shorten(calls)}")
        given["tool_calls"] = [_tool_call(what, call) for call in calls]
    content = given.get("content")
    if isinstance(content, list):
        content = given["content"] = "".join(_part(what, n, p) for n, p in enumerate(content, 1))
    if content is None and calls:
        # OpenAI's own messages have a null content here.
        given["content"] = None
    elif not isinstance(content, str):
        raise DataError(
            f"{what}: each message must be {{role: text, content: text}}, where the content may be"
            f" a list of text parts too, or null next to tool_calls; got {shorten(message)}"
        )
    return given


def _part(what: str, number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text" or not isinstance(text, str):
        raise DataError(
            f"{what}: part {number} of its content is of type {kind!r}; only text parts,"
            ' {"type": "text", "text": ...}, can be trained on: rlcore has no vision models'
        )
    return text


def _tool_call(what: str, call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as a map; OpenAI writes them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{what}: a tool call must be {{function: {{name, arguments}}}}; got {shorten(call)}"
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{what}: the arguments of the call of {function['name']!r} are not JSON ({error}):"
                f" {shorten(arguments)}"
            ) from error
    if not isinstance(arguments, dict):
        raise DataError(
            f"{what}: the arguments of the call of {function['name']!r} must be a map, or JSON text"
            f" of one, as {{}} where there are none; got {shorten(arguments)}"
        )
    return {**call, "function": {**function, "arguments": arguments}}


def read_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Read the JSON value that begins at `start`. Returns the value and its end.

    Raises:
        ValueError: the text is not JSON, or is ambiguous.
        RecursionError: the value is nested too deeply.
    """
    return _DECODER.raw_decode(text, start)


def parse_json(text: str) -> Any:
    """Return the value of a text that is JSON as a whole. Raises as `read_json`."""
    value, end = read_json(text, len(text) - len(text.lstrip()))
    if text[end:].strip():
        raise ValueError(f"there is more after it: {shorten(text[end:])}")
    return value


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{shorten(digits)} is too large for a number")
    return number


def _whole(digits: str) -> int:
    try:
        return int(digits)
    except ValueError as error:
        raise ValueError(f"a number of {len(digits)} digits is too long") from error


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in found if keys.count(key) > 1)
        raise ValueError(f"it has the key {twice!r} twice")
    return found


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_number, parse_float=_finite, parse_int=_whole
)


def parse_tools(where: str, key: str | None, tools: Any) -> list[dict[str, Any]]:
    """Return the tools of a row: a list of JSON schemas, or such a list as JSON text."""
    given = tools
    if isinstance(given, str):
        try:
            given = orjson.loads(given or "[]")
        except orjson.JSONDecodeError as error:
            raise DataError(
                f"{where}: {key!r} is text that is not JSON ({error}): {shorten(tools)}"
            ) from error
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(tool, dict) for tool in given):
        raise DataError(
            f"{where}: {key!r} must be a list of tools as JSON schemas (data.tools_key; null reads"
            f" none); got {shorten(tools)}"
        )
    return given


def dress(prompt: str | list[Message], data: DataConfig) -> str | list[Message]:
    """Return the prompt with the system prompt and template set in `data`."""
    if isinstance(prompt, str) and (data.as_chat or data.system_prompt is not None):
        prompt = [{"role": "user", "content": prompt}]
    template = data.prompt_template
    if isinstance(prompt, str):
        return prompt if template is None else template.replace("{prompt}", prompt)
    messages = list(prompt)
    if template is not None:
        users = [i for i, message in enumerate(messages) if message["role"] == "user"]
        for i in users[-1:]:
            content = template.replace("{prompt}", messages[i]["content"])
            messages[i] = {**messages[i], "content": content}
    if data.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return messages
