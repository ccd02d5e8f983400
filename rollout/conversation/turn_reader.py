"""Splits a turn into plain text, thoughts, and calls of which every character is understood."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from rlcore.data.messages import parse_json, read_json
from rollout.conversation.formats import CallForm, Format
from rollout.conversation.reply import ToolCall, Turn

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplateField

SIGNS = re.compile(r"[<\[{]")  # first characters of all parts, except at the head of a turn
CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})
OWN_ID = re.compile("[A-Za-z0-9]{9}")  # the ids that Mistral's chat templates take
# group of `CallForm.arguments`
IS_TEXT = "is_text"
# names in the response templates of transformers
CALLS = "tool_calls"
BODY = "body of a call"
SHAPE = "a call must be of the form that the chat template shows"


class TurnReader:
    """Reads turns in one format."""

    def __init__(self, form: Format) -> None:
        parts = {"call": form.begin, "thought": form.thought[0]}
        self._ends = {"thought": _compiled(form.thought[1])}
        if form.said is not None:
            parts["said"] = form.said[0]
            self._ends["said"] = _compiled(form.said[1])
        groups = [f"(?P<{name}>{pattern})" for name, pattern in parts.items()]
        self._next = _compiled("|".join(groups))
        self._next_without_calls = _compiled("|".join(groups[1:]))
        self._forms = form.forms
        self._until = _compiled(form.until)

    def __call__(self, text: str, *, calls: bool) -> Turn:
        """Read a turn; everything that looks like a call is text unless `calls` is set."""
        turn = Turn()
        pattern = self._next if calls else self._next_without_calls
        at = 0
        while found := _next(pattern, text, at):
            turn.said.append(text[at : found.start()])
            if found.lastgroup == "call":
                written, at = self._call(text, found)
                turn.calls += written
                continue
            part = turn.said if found.lastgroup == "said" else turn.thought
            end = self._ends[str(found.lastgroup)].search(text, found.end())
            part.append(text[found.end() : end.start() if end else len(text)])
            at = end.end() if end else len(text)
        turn.said.append(text[at:])
        return turn

    def _call(self, text: str, begin: re.Match[str]) -> tuple[list[ToolCall], int]:
        """The calls that begin here, usually one, and their end."""
        name = ""
        message = self._forms[0].shape
        for form in self._forms:
            head = _compiled(form.head).match(text, begin.end())
            if head is None:
                continue
            captured = head.groupdict()
            name = (captured.get("name") or "").strip()
            message = form.shape
            try:
                found, at = _arguments(form, text, head.end())
            except (ValueError, RecursionError) as error:
                message += f" ({error})"
                continue
            if end := _compiled(form.end).match(text, at):
                raw = text[begin.start() : end.end()]
                calls = _calls(form, raw, name, found)
                if own_id := captured.get("id"):
                    calls = [replace(call, own_id=own_id) for call in calls]
                return calls, end.end()
        # search from at least one character later, so as not to find the same call again
        stop = self._until.search(text, max(begin.end(), begin.start() + 1))
        last = stop.end() if stop else len(text)
        return [ToolCall(text[begin.start() : last], name, error=message)], last


def _arguments(form: CallForm, text: str, at: int) -> tuple[Any, int]:
    """The arguments that begin at `at`, and their end; raises like `read_json`."""
    if form.is_json:
        return read_json(text, at)
    found: dict[str, Any] = {}
    pattern = _compiled(form.arguments)
    while argument := pattern.match(text, at):
        key = argument["key"]
        if key in found:
            raise ValueError(f"it has the argument {key!r} twice")
        value = argument["value"].removeprefix(form.margin).removesuffix(form.margin)
        is_json = argument.groupdict().get(IS_TEXT) == "false"
        found[key] = parse_json(value) if is_json else value
        at = argument.end()
    return found, at


def _calls(form: CallForm, raw: str, name: str, found: Any) -> list[ToolCall]:
    """The calls in parsed arguments."""
    if not form.is_json:
        typed = IS_TEXT in _compiled(form.arguments).groupindex
        return [ToolCall(raw, name, found, as_texts="" if typed else form.literals)]
    if form.arguments == "map":
        found = {"name": name, "arguments": found}
    several = form.arguments == "calls" and isinstance(found, list) and found
    return [_call_of(raw, call, form.shape) for call in (found if several else [found])]


def _call_of(raw: str, call: Any, shape: str) -> ToolCall:
    """The call that a map describes; `shape` is the message about a map of another shape."""
    given = call if isinstance(call, dict) else {}
    name = given.get("name")
    arguments = given.get("arguments", given.get("parameters"))
    message = shape
    # some models write the arguments as JSON inside a string
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except (ValueError, RecursionError) as error:
            message += f" ({error})"
    if not isinstance(name, str):
        return ToolCall(raw, error=message)
    understood = (
        given.keys() <= CALL_KEYS
        and not {"arguments", "parameters"} <= given.keys()
        and given.get("type", "function") == "function"
    )
    if not understood or not isinstance(arguments, dict):
        return ToolCall(raw, name.strip(), error=message)
    own_id = str(given.get("id"))
    return ToolCall(raw, name.strip(), arguments, own_id=own_id if OWN_ID.fullmatch(own_id) else "")


def _next(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """The next match of a part's beginning; ten times as fast as a plain search in long texts."""
    if not at and (found := pattern.match(text)):
        return found
    for sign in SIGNS.finditer(text, at):
        if found := pattern.match(text, sign.start()):
            return found
    return None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)


class TemplateReader:
    """Reads turns by a response template of transformers, as stored in a tokenizer.

    Transformers finds the calls and interprets their fields, but its content parsers skip unknown
    text; a call with such text counts as unreadable here.
    """

    def __init__(self, given: Any) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        # check and compile the template once, rather than in every turn
        template = load_response_template(given)
        fields = dict(template.fields)
        self._calls = fields.pop(CALLS, None)
        self._without_calls = replace(template, fields=fields)
        self._template = template
        if (calls := self._calls) is not None:
            # keep the captures of a call and its content, as text
            names = calls.open_re.groupindex
            unparsed = replace(
                calls,
                content="text",
                content_args={"strip": False},
                repeats=True,
                join=None,
                transform={**{name: f"{{{name}}}" for name in names}, BODY: "{content}"},
                transform_each=False,
            )
            self._template = replace(template, fields={**fields, CALLS: unparsed})

    def __call__(self, sent: str, text: str, *, calls: bool) -> Turn:
        """Read a turn; `sent` is the end of the text sent to the model, which may begin a field."""
        from transformers.utils.chat_parsing import ResponseParser

        parser = ResponseParser(self._template if calls else self._without_calls, prefix=sent)
        # `feed` would wait for text that might change the result, but none follows
        parser._buffer += text
        try:
            found, _ = parser.finalize()
        except (ValueError, KeyError, RecursionError):
            # a field does not match its declared type
            return Turn(said=[text])
        turn = Turn(
            said=[str(found.get("content") or "")],
            thought=[str(found.get("reasoning_content") or "")],
        )
        for captures in found.get(CALLS) or ():
            turn.calls += self._read(captures, parser._buffer)
        return turn

    def _read(self, captures: dict[str, Any], text: str) -> list[ToolCall]:
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
            return [ToolCall(body, name, error=f"{SHAPE} ({error})")]
        as_texts: Literal["", "json"] = "" if field.content == "json" else "json"
        return [
            replace(_call_of(body, one, SHAPE), as_texts=as_texts)
            for call in (found if isinstance(found, list) else [found])
            for one in [call.get("function", call) if isinstance(call, Mapping) else call]
        ]


def _is_open(body: str, text: str, field: ResponseTemplateField) -> bool:
    """Whether the end of a field is missing."""
    if field.close_re is None or field.close_re.search(text, len(text)):
        return False
    return any(text[begin.end() :] == body for begin in field.open_re.finditer(text))


def _check_whole(body: str, field: ResponseTemplateField) -> None:
    """Raise ValueError if the content parser of a field would skip or replace something."""
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
