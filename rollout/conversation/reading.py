"""Splits a turn into what was said, thoughts, and calls of which every character is understood."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlcore.data.messages import parse_json, read_json
from rollout.conversation.formats import CallForm, Format

SIGNS = re.compile(r"[<\[{]")  # with which all parts begin, except at the head of a turn
CALL_KEYS = frozenset({"name", "arguments", "parameters", "id", "type"})


@dataclass(frozen=True)
class WrittenCall:
    """A call as it stands in a turn.

    Attributes:
        raw: all of its text.
        arguments: None if not every character of the call is understood.
        problem: why not.
        as_texts: the values are texts, and the tool's schema says of which type they are.
    """

    raw: str
    name: str = ""
    arguments: dict[str, Any] | None = None
    problem: str = ""
    as_texts: bool = False


@dataclass
class Turn:
    """The parts of a turn."""

    said: list[str] = field(default_factory=list)
    thought: list[str] = field(default_factory=list)
    calls: list[WrittenCall] = field(default_factory=list)


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
        self._forms = [_FormReader(one) for one in form.forms]
        self._until = _compiled(form.until)

    def __call__(self, text: str, *, calls: bool) -> Turn:
        """Read a turn.

        Args:
            calls: else what looks like a call is text.
        """
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

    def _call(self, text: str, begin: re.Match[str]) -> tuple[list[WrittenCall], int]:
        """Return the calls that begin here, mostly one, and where they end."""
        name = ""
        problem = self._forms[0].form.shape
        for form in self._forms:
            head = form.head.match(text, begin.end())
            if head is None:
                continue
            name = (head.groupdict().get("name") or "").strip()
            problem = form.form.shape
            try:
                found, at = form.arguments(text, head.end())
            except (ValueError, RecursionError) as error:
                problem += f" ({error})"
                continue
            if end := form.end.match(text, at):
                raw = text[begin.start() : end.end()]
                return list(form.calls(raw, name, found)), end.end()
        # one that begins at its end would be found again
        stop = self._until.search(text, max(begin.end(), begin.start() + 1))
        last = stop.end() if stop else len(text)
        return [WrittenCall(text[begin.start() : last], name, problem=problem)], last


class _FormReader:
    def __init__(self, form: CallForm) -> None:
        self.form = form
        self.head = _compiled(form.head)
        self.end = _compiled(form.end)
        as_texts = form.arguments not in ("map", "call", "calls")
        self._argument = _compiled(form.arguments) if as_texts else None

    def arguments(self, text: str, at: int) -> tuple[Any, int]:
        """Return the arguments that begin at a place, and where they end.

        Raises:
            ValueError: there are none that say one thing.
            RecursionError: they are nested too deep.
        """
        if self._argument is None:
            return read_json(text, at)
        found: dict[str, str] = {}
        margin = self.form.margin
        while argument := self._argument.match(text, at):
            key = argument["key"]
            if key in found:
                raise ValueError(f"it has the argument {key!r} twice")
            found[key] = argument["value"].removeprefix(margin).removesuffix(margin)
            at = argument.end()
        return found, at

    def calls(self, raw: str, name: str, found: Any) -> Iterator[WrittenCall]:
        """Yield the calls of what was read."""
        if self._argument is not None:
            yield WrittenCall(raw, name, found, as_texts=True)
        elif self.form.arguments == "map":
            yield call_of(raw, {"name": name, "arguments": found}, self.form.shape)
        elif self.form.arguments == "calls" and isinstance(found, list) and found:
            yield from (call_of(raw, one, self.form.shape) for one in found)
        else:
            yield call_of(raw, found, self.form.shape)


def call_of(raw: str, call: Any, shape: str) -> WrittenCall:
    """Return the call that a map with its name says.

    Args:
        shape: the message to the model about a map of another shape.
    """
    given = call if isinstance(call, dict) else {}
    name = given.get("name")
    arguments = given.get("arguments", given.get("parameters"))
    problem = shape
    if isinstance(arguments, str):  # some models write JSON in a text
        try:
            arguments = parse_json(arguments)
        except (ValueError, RecursionError) as error:
            problem += f" ({error})"
    if not isinstance(name, str):
        return WrittenCall(raw, problem=problem)
    understood = (
        given.keys() <= CALL_KEYS
        and not {"arguments", "parameters"} <= given.keys()
        and given.get("type", "function") == "function"
    )
    if not understood or not isinstance(arguments, dict):
        return WrittenCall(raw, name.strip(), problem=problem)
    return WrittenCall(raw, name.strip(), arguments)


def _next(pattern: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """Return where a part begins; a tenth of the time of a search in long texts."""
    if not at and (found := pattern.match(text)):
        return found
    for sign in SIGNS.finditer(text, at):
        if found := pattern.match(text, sign.start()):
            return found
    return None


def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.DOTALL)
