"""Reads turns by the response template that a tokenizer brings.

transformers finds the calls and says what their fields mean. Its content parsers skip what they do
not know; here that makes a call one that cannot be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlcore.data.messages import parse_json
from rollout.conversation.reading import Turn, WrittenCall, call_of

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

CALLS = "tool_calls"
BODY = "body of a call"
SHAPE = "a call must be of the form that the chat template shows"


class OwnTemplate:
    """Reads turns by a response template of transformers.

    Args:
        given: the template, as the tokenizer has it.
    """

    def __init__(self, given: Any) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        # checked and compiled once, not turn by turn
        template = load_response_template(given)
        fields = dict(template.fields)
        self._calls = fields.pop(CALLS, None)
        self._without_calls = replace(template, fields=fields)
        self._template = template
        if self._calls is not None:
            raw = {**fields, CALLS: _unparsed(self._calls)}
            self._template = replace(template, fields=raw)

    def __call__(self, sent: str, text: str, *, calls: bool) -> Turn:
        """Read a turn.

        Args:
            sent: the end of what the model was sent; it may begin a field.
            calls: else what looks like a call is text.
        """
        from transformers.utils.chat_parsing import ResponseParser

        parser = ResponseParser(self._template if calls else self._without_calls, prefix=sent)
        # `feed` would look for what later text may still change, and there is none
        parser._buffer += text
        try:
            found, _ = parser.finalize()
        except (ValueError, KeyError, RecursionError):  # a field is not what it says
            return Turn(said=[text])
        turn = Turn(
            said=[str(found.get("content") or "")],
            thought=[str(found.get("reasoning_content") or "")],
        )
        for captures in found.get(CALLS) or ():
            turn.calls += self._read(captures, parser._buffer)
        return turn

    def _read(self, captures: dict[str, Any], text: str) -> list[WrittenCall]:
        """Return the calls of one field, by its captures."""
        from transformers.utils.chat_parsing.content_parsers import process_field

        field = self._calls
        assert field is not None
        body = captures.pop(BODY)
        name = str(captures.get("name") or "")
        try:
            if field.content != "json" and _is_open(body, text, field):
                raise ValueError("its end is missing")
            _check_whole(body, field)
            found = process_field(body, field, captures)
            json.dumps(found, allow_nan=False)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return [WrittenCall(body, name, problem=f"{SHAPE} ({error})")]
        as_texts = field.content != "json"
        return [
            replace(call_of(body, _function(one), SHAPE), as_texts=as_texts)
            for one in (found if isinstance(found, list) else [found])
        ]


def _unparsed(field: ResponseTemplateField) -> ResponseTemplateField:
    """Return a field of calls that keeps its captures and what it encloses as texts."""
    return replace(
        field,
        content="text",
        content_args={"strip": False},
        repeats=True,
        join=None,
        transform={**{name: f"{{{name}}}" for name in field.open_re.groupindex}, BODY: "{content}"},
        transform_each=False,
    )


def _is_open(body: str, text: str, field: ResponseTemplateField) -> bool:
    """Whether the end of a field is missing."""
    if field.close_re is None or field.close_re.search(text, len(text)):
        return False
    return any(text[begin.end() :] == body for begin in field.open_re.finditer(text))


def _check_whole(body: str, field: ResponseTemplateField) -> None:
    """Raise ValueError where the content parser of a field would skip or replace something."""
    args = field.content_args
    if field.content == "json":
        if not args.keys() & {"unquoted_keys", "string_delims"}:
            parse_json(body)
        return
    pairs: list[str] = []
    left = ""
    if field.content == "xml-inline":
        pattern = re.compile(args["tag_pattern"], re.DOTALL)
        pairs = [match["key"] for match in pattern.finditer(body)]
        left = pattern.sub("", body)
    elif field.content == "kv-lines":
        separator = args.get("kv_sep", ":")
        lines = [line for line in body.split(args.get("line_sep", "\n")) if line.strip()]
        pairs = [line.split(separator, 1)[0].strip() for line in lines if separator in line]
        left = "".join(line for line in lines if separator not in line)
    if left.strip():
        raise ValueError(f"{left.strip()[:80]!r} is none of its arguments")
    if len({*pairs}) < len(pairs) and not args.get("merge_duplicates"):
        raise ValueError("it has an argument twice")


def _function(call: Any) -> Any:
    return call.get("function", call) if isinstance(call, Mapping) else call
