"""The rows of all sources as examples, found by their format and dressed as configured.

A format names the columns that hold the prompt, the label and the tools. `detect` recognises it by
the columns of the first rows.
"""

from __future__ import annotations

import difflib
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.config.sections.data import AUTO, DataConfig
from rlcore.data.messages import Message, check_messages, dress, parse_tools
from rlcore.data.paths.hub import check_path, expand, open_path
from rlcore.data.preferences import (
    CHOSEN,
    COMPLETION,
    PREFERENCE,
    REJECTED,
    VERDICT,
    read_preference,
)
from rlcore.data.rows import RowFile, has, pick, shorten, without_nulls
from rlcore.errors import DataError, named_by

logger = logging.getLogger(__name__)

_FIRST_ROWS = 32  # rows whose columns determine the format
# Fields of maps that hold the reference to compare an answer with.
ANSWERS = ("ground_truth", "answer", "target", "label", "value")
_ANSWERS_OF_PAIRS = (CHOSEN, REJECTED, COMPLETION, VERDICT)
SOURCE = "source"  # key of `Example.extra`, and so of `Sample.metadata`


@dataclass(frozen=True)
class Format:
    """A format: for each part of a row the columns that may hold it; the first existing one counts.

    Column names may be dotted.
    """

    prompt: tuple[str, ...]
    label: tuple[str, ...]
    source: str | None = None  # origin of the row, such as `openai/gsm8k`
    tools: str | None = None
    metadata: str | None = None  # a map whose keys become columns
    label_needed: bool = True


# Formats in the order in which they are tried.
FORMATS: Mapping[str, Format] = {
    "verl": Format(("prompt",), ("reward_model.ground_truth",), source="data_source"),
    "open-instruct": Format(("messages",), ("ground_truth",), source="dataset"),
    "openai": Format(("messages", "question"), ("answer",), tools="tools", label_needed=False),
    "slime": Format(("prompt",), ("label",), tools="tools", metadata="metadata"),
    PREFERENCE: Format(
        ("prompt", "question", "instruction", CHOSEN), (CHOSEN, COMPLETION), tools="tools"
    ),
    "plain": Format(("prompt", "question", "problem"), ("label", "answer", "solution")),
    "trl": Format(
        ("prompt",),
        ("completion", "ground_truth", "solution", "answer", "label"),
        tools="tools",
        label_needed=False,
    ),
}


@dataclass(frozen=True, slots=True)
class Example:
    """One row: its prompt as text or chat messages, its label, and its other columns."""

    where: str  # "file:line"; in parquet "file:row", counted from 1
    prompt: str | list[Message]
    label: Any
    extra: dict[str, Any]
    tools: list[dict[str, Any]] = field(default_factory=list)
    chat_kwargs: Mapping[str, Any] = field(default_factory=dict)  # data.chat_template_kwargs
    label_key: str | None = None  # the key that the label was read from
    # The assistant's message at the end of `messages`, which is not part of the prompt.
    answer: Message | None = None
    # `rlcore.data.preferences`: the worse answer of a pair, and whether a label alone is good.
    rejected: str | Message | None = None
    is_good: bool = True

    @property
    def contribution(self) -> tuple[Any, ...]:
        """All parts that rewards, workflows and templates may read, without the row's location."""
        kwargs = dict(self.chat_kwargs)
        whole = (self.prompt, self.label, self.extra, self.tools, self.answer, kwargs)
        is_usual = self.rejected is None and self.is_good
        return whole if is_usual else (*whole, self.rejected, self.is_good)


@dataclass(frozen=True)
class Part:
    """The rows of one file or data set, with the columns of their parts."""

    path: str
    rows: RowFile
    data: DataConfig  # the keys that the rows are read with
    source: str | None  # the name in data.sources
    format: str
    prompt: str
    label: str | None
    tools: str | None

    @classmethod
    def of(cls, path: str, rows: RowFile, data: DataConfig, source: str | None) -> Part:
        """Find the columns of the rows' parts. A key of `data` other than `auto` takes precedence.

        Raises:
            DataError: one of the first rows is invalid.
        """
        first = list(islice(iter(rows), _FIRST_ROWS))
        name = detect(first) if data.format == AUTO else data.format
        known = FORMATS[name]
        label = _first_there(known.label, first)
        if label is None and known.label_needed:
            label = known.label[0]
        prompt = _first_there(known.prompt, first) or known.prompt[0]
        tools = known.tools if known.tools and _first_there((known.tools,), first) else None
        return cls(
            path,
            rows,
            data,
            source,
            format=name,
            prompt=prompt if data.prompt_key == AUTO else data.prompt_key,
            label=label if data.label_key == AUTO else data.label_key,
            tools=tools if data.tools_key == AUTO else data.tools_key,
        )

    @property
    def splits_chats(self) -> bool:
        """Whether an assistant's last message is the answer, and not part of the prompt."""
        return self.prompt == "messages" and self.format in ("openai", "open-instruct")

    def __str__(self) -> str:
        parts = [f"prompt in {self.prompt!r}"]
        if self.label is not None:
            parts.append(f"label in {self.label!r}")
        elif self.splits_chats:
            parts.append("label: the assistant's last message")
        else:
            parts.append("no label")
        if self.tools:
            parts.append(f"tools in {self.tools!r}")
        return f"{self.path}: {len(self.rows):,} rows, format {self.format}, {', '.join(parts)}"

    def example(self, index: int, row: dict[str, Any]) -> Example:
        """Make an example of row `index`. Raises DataError if the row lacks a part."""
        where = self.rows.where(index)
        if self.format == PREFERENCE:
            return self._preference(where, row)
        prompt = self._value(where, row, self.prompt, "data.prompt_key")
        if isinstance(prompt, list):
            prompt = check_messages(where, self.prompt, self._given(prompt))
        if not prompt or not isinstance(prompt, str | list):
            raise DataError(
                f"{where}: {self.prompt!r} must be text or a list of chat messages, and not empty; "
                f"got {type(prompt).__name__}: {shorten(prompt)}"
            )
        label = self._label(where, row)
        if isinstance(label, list):
            label = self._given(label)
        answer = None
        if isinstance(prompt, list) and self.splits_chats and prompt[-1]["role"] == "assistant":
            answer = prompt[-1]
            prompt = prompt[:-1]
            label = answer.get("content") if label is None else label
            if not prompt:
                raise DataError(f"{where}: {self.prompt!r} holds an answer but no prompt")
        tools = pick(row, self.tools) if self.tools and has(row, self.tools) else None
        return Example(
            where,
            dress(prompt, self.data),
            label,
            self._extra(row),
            parse_tools(where, self.tools, self._given(tools)) or self.data.tools,
            self.data.chat_template_kwargs,
            label_key=self.label,
            answer=answer,
        )

    def _preference(self, where: str, row: dict[str, Any]) -> Example:
        apart = self.prompt != CHOSEN and has(row, self.prompt)
        prompt = pick(row, self.prompt) if apart else None
        if isinstance(prompt, list):
            prompt = check_messages(where, self.prompt, self._given(prompt))
        answers = {key: self._given(row[key]) for key in _ANSWERS_OF_PAIRS if key in row}
        found = read_preference(where, answers, prompt)
        answer = found.answer
        tools = pick(row, self.tools) if self.tools and has(row, self.tools) else None
        read = (self.prompt, *answers)
        return Example(
            where,
            dress(found.prompt, self.data),
            answer if isinstance(answer, str) else answer.get("content"),
            {key: value for key, value in self._extra(row).items() if key not in read},
            parse_tools(where, self.tools, self._given(tools)) or self.data.tools,
            self.data.chat_template_kwargs,
            label_key=self.label,
            answer=None if isinstance(answer, str) else answer,
            rejected=found.rejected,
            is_good=found.is_good,
        )

    def _given(self, value: Any) -> Any:
        """Return a value without the nulls that a columnar file puts in missing fields."""
        return without_nulls(value) if self.rows.fills_with_null else value

    def _label(self, where: str, row: dict[str, Any]) -> Any:
        if self.label is None:
            return None
        if self.data.label_key == AUTO and not FORMATS[self.format].label_needed:
            return pick(row, self.label) if has(row, self.label) else None
        label = self._value(where, row, self.label, "data.label_key")
        # open-instruct lists one ground truth per verifier of a row.
        single = self.format == "open-instruct" and isinstance(label, list) and len(label) == 1
        return label[0] if single else label

    def _value(self, where: str, row: dict[str, Any], key: str, setting: str) -> Any:
        try:
            return pick(row, key)
        except KeyError:
            pass
        near = difflib.get_close_matches(key, row, n=1)
        advice = f"; did you mean {near[0]!r}?" if near else ""
        advice = f"; set {setting} to {found}" if (found := find_key(row, key)) else advice
        null = "; null for prompts without labels" if setting == "data.label_key" else ""
        has_keys = ", ".join(map(repr, row)) or "no keys"
        raise DataError(
            f"{where}: no key {key!r} ({setting}{null}); the row has {has_keys}{advice}"
        )

    def _extra(self, row: dict[str, Any]) -> dict[str, Any]:
        known = FORMATS[self.format]
        extra = {key: value for key, value in row.items() if key not in (self.prompt, self.label)}
        inner = None if known.metadata is None else extra.get(known.metadata)
        if isinstance(inner, dict):
            extra = {**inner, **extra}
        if known.source is not None and has(row, known.source):
            name = pick(row, known.source)
            extra.setdefault(SOURCE, "+".join(map(str, name)) if isinstance(name, list) else name)
        return extra if self.source is None else {**extra, SOURCE: self.source}


def detect(rows: Sequence[dict[str, Any]]) -> str:
    """Return the format of the rows; `plain` if they match no other format."""

    def there(*keys: str) -> bool:
        return all(any(has(row, key) for row in rows) for key in keys)

    if there(CHOSEN, REJECTED):
        return PREFERENCE
    if there(COMPLETION, VERDICT) and any(isinstance(row.get(VERDICT), bool) for row in rows):
        return PREFERENCE
    if there("prompt", "reward_model.ground_truth"):
        return "verl"
    if there("messages", "ground_truth"):
        return "open-instruct"
    if there("messages") or (there("question", "answer") and not there("prompt")):
        return "openai"
    if there("prompt", "label"):
        maps = any(isinstance(row.get("metadata"), dict) for row in rows)
        return "slime" if maps or there("tools") else "plain"
    trl = FORMATS["trl"]
    return "trl" if there("prompt") and _first_there(trl.label, rows) else "plain"


def find_key(row: dict[str, Any], key: str) -> str | None:
    """Return the dotted key that `key` most likely stands for, if the row has one.

    This is a field of the same name inside a column, or the field of a label.
    """
    inside = dict(_dotted(row))
    wanted = key.rsplit(".", maxsplit=1)[-1]
    likely = [name for name in inside if name.rsplit(".", maxsplit=1)[-1] == wanted]
    if not likely and key in ("label", "answer", "ground_truth"):
        likely = [name for name in inside if name.endswith(".ground_truth")]
    return likely[0] if likely else None


def check_label(example: Example, reader: str) -> None:
    """Refuse a label that is neither text nor a number (DataError); names the key to set.

    Args:
        reader: the reader of the label, for the message.
    """
    label = example.label
    if isinstance(label, str | int | float) and not isinstance(label, bool):
        return
    message = f"{example.where}: the label must be text or a number for {reader}"
    if isinstance(label, dict):
        inside = [k for k, v in _dotted({"": label}) if isinstance(v, str | int | float)]
        likely = next((k for k in inside if k.endswith(ANSWERS)), None)
        keys = ", ".join(repr(key) for key in label)
        advice = f": set data.label_key to {example.label_key}{likely}" if likely else ""
        raise DataError(f"{message}, got a map with {keys}{advice}")
    if label is None:
        likely = find_key(example.extra, example.label_key or "label")
        advice = f": set data.label_key to {likely}" if likely else " (data.label_key)"
        raise DataError(f"{message}, got null{advice}")
    raise DataError(f"{message}, got {type(label).__name__}: {shorten(label)}")


def _dotted(row: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of every field inside a column that is a map."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{path}{name}.")
        elif path and value is not None:
            yield f"{path}{name}", value


def _first_there(keys: Sequence[str], rows: Sequence[dict[str, Any]]) -> str | None:
    return next((key for key in keys if any(has(row, key) for row in rows)), None)


class Examples:
    """The rows of all sources, or some of them, in order; each row is read on access.

    Args:
        rows: int64 [N], the chosen rows, in increasing order; default: all.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        transform: Callable[[Example], Example] = lambda e: e,
        rows: NDArray[np.int64] | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self._transform = transform
        self._starts = [0, *accumulate(len(part.rows) for part in parts)]
        self._rows = rows

    @property
    def rows(self) -> NDArray[np.int64]:
        """The numbers of these rows among all sources, int64 [N], in increasing order."""
        return np.arange(self._starts[-1]) if self._rows is None else self._rows

    def __len__(self) -> int:
        return self._starts[-1] if self._rows is None else len(self._rows)

    def take(self, rows: NDArray[np.int64]) -> Examples:
        """Return some rows, by their increasing numbers among all sources."""
        return Examples(self.parts, self._transform, rows)

    def changed(self, change: Callable[[Example], Example]) -> Examples:
        """Return the same rows, each changed on access."""
        before = self._transform
        return Examples(self.parts, lambda example: change(before(example)), self._rows)

    def part(self, index: int) -> tuple[Part, int]:
        """Return the file of a row, and the row's index in the file."""
        row = index if self._rows is None else int(self._rows[index])
        at = bisect_right(self._starts, row) - 1
        return self.parts[at], row - self._starts[at]

    def where(self, index: int) -> str:
        """Return "file:line" of a row, without reading the row."""
        part, at = self.part(index)
        return part.rows.where(at)

    def __getitem__(self, index: int) -> Example:
        if index >= len(self):
            raise IndexError(index)
        part, at = self.part(index)
        return self._transform(part.example(at, part.rows[at]))

    def __iter__(self) -> Iterator[Example]:
        wanted = iter(range(len(self)) if self._rows is None else self._rows.tolist())
        following = next(wanted, None)
        for first, part in zip(self._starts, self.parts):
            # Much faster than reading rows one by one.
            for at, row in enumerate(part.rows):
                if following is None:
                    return
                if first + at == following:
                    yield self._transform(part.example(at, row))
                    following = next(wanted, None)


def open_examples(
    data: DataConfig,
    paths: Sequence[str] | None = None,
    transform: Callable[[Example], Example] = lambda e: e,
    *,
    key: str = "evaluation.paths",
) -> Examples:
    """Open the files of `data`, and log their formats.

    Args:
        paths: files to open instead, with the keys of `data` itself.
        key: the key that sets `paths`, for messages.

    Raises:
        DataError: a file that cannot be read.
    """
    parts = []
    for name, own, path, origin in _wanted(data, paths, key):
        with named_by(origin):
            rows = open_path(path, subset=own.subset, split=own.split)
        parts.append(Part.of(path, rows, own, name))
        logger.info("data: %s", parts[-1])
    return Examples(parts, transform)


def check_examples(
    data: DataConfig, paths: Sequence[str] | None = None, *, key: str = "evaluation.paths"
) -> None:
    """Refuse missing files (DataError) without reading any. Arguments as in `open_examples`."""
    for _, _, path, origin in _wanted(data, paths, key):
        with named_by(origin):
            check_path(path)


def _wanted(
    data: DataConfig, paths: Sequence[str] | None, key: str
) -> Iterator[tuple[str | None, DataConfig, str, str]]:
    """Yield (source, its data keys, file or data set, the key that names the file)."""
    given: list[tuple[str | None, DataConfig, Sequence[str], str]]
    if paths is not None:
        given = [(None, data, paths, key)]
    elif data.sources:
        sources = {name: data.of_source(name) for name in data.sources}
        given = [
            (name, own, own.paths, f"data.sources.{name}.paths") for name, own in sources.items()
        ]
    else:
        given = [(None, data, data.paths, "data.paths")]
    for name, own, several, origin in given:
        for path in several:
            with named_by(origin):
                files = expand(path, own.split)
            yield from ((name, own, file, origin) for file in files)
