"""Rows of JSONL and parquet files. A bad row is an error that names its file and line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rlcore.data.tokenizer import Message
from rlcore.errors import DataError

JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True, slots=True)
class Example:
    """One row: its prompt as text or chat messages, its label, and its other columns."""

    where: str  # "file:line"; in parquet "file:row", counted from 1
    prompt: str | list[Message]
    label: Any
    extra: dict[str, Any]


def read_examples(
    paths: Sequence[str], *, prompt_key: str, label_key: str | None
) -> Iterator[Example]:
    """Yield every row of `paths`, in order.

    Raises:
        DataError: a file cannot be read, or a row is not an object, lacks a key or holds the wrong
            type.
    """
    for path in paths:
        for where, row in read_rows(Path(path)):
            yield _example(where, row, prompt_key, label_key)


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ("file:line", row) for each row of one file."""
    check_file(path)
    return _parquet_rows(path) if path.suffix == ".parquet" else _jsonl_rows(path)


def check_file(path: Path) -> None:
    """Refuse a file that is not there or is of no known kind (DataError); reads nothing."""
    if not path.is_file():
        raise DataError(f"data: {path} is not a file; expected JSONL or parquet, one row a prompt")
    if path.suffix not in (".parquet", *JSONL_SUFFIXES):
        raise DataError(
            f"data: {path} has the suffix {path.suffix!r}; known are .parquet,"
            f" {', '.join(JSONL_SUFFIXES)}"
        )


def _jsonl_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    content = path.read_bytes().removeprefix(b"\xef\xbb\xbf").rstrip()
    if not content:
        return
    for number, line in enumerate(content.split(b"\n"), start=1):
        where = f"{path}:{number}"
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            # orjson counts lines inside the row too; only the column means something to the reader.
            reason = re.sub(r": line \d+ column (\d+) \(char \d+\)", r" at column \1", str(error))
            text = _shorten(line.decode(errors="replace"))
            raise DataError(
                f"{where}: not JSON ({reason}), expected one object a line: {text!r}"
            ) from error
        if not isinstance(row, dict):
            raise DataError(
                f"{where}: expected a JSON object, got {type(row).__name__}: {_shorten(row)}"
            )
        yield where, row


def _parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path}: not a readable parquet file after row {number}: {error}"
        ) from error


def _example(where: str, row: dict[str, Any], prompt_key: str, label_key: str | None) -> Example:
    if prompt_key not in row:
        raise DataError(
            f"{where}: no key {prompt_key!r} (data.prompt_key); the row has {_keys(row)}"
        )
    if label_key is not None and label_key not in row:
        raise DataError(
            f"{where}: no key {label_key!r} (data.label_key; null for prompts without labels); the"
            f" row has {_keys(row)}"
        )
    prompt = row[prompt_key]
    if isinstance(prompt, list):
        prompt = [_message(where, prompt_key, message) for message in prompt]
    if not prompt or not isinstance(prompt, str | list):
        raise DataError(
            f"{where}: {prompt_key!r} must be text or a list of chat messages, and not empty; "
            f"got {type(prompt).__name__}: {_shorten(prompt)}"
        )
    extra = {key: value for key, value in row.items() if key not in (prompt_key, label_key)}
    return Example(where, prompt, row[label_key] if label_key is not None else None, extra)


def _message(where: str, prompt_key: str, message: Any) -> Message:
    # Parquet gives every message every field of the column: a field that is null was never there.
    given = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    if not isinstance(given.get("role"), str) or not isinstance(given.get("content"), str):
        raise DataError(
            f"{where}: each message of {prompt_key!r} must be {{role: text, content: text}}; got"
            f" {_shorten(message)}"
        )
    return given


def _keys(row: dict[str, Any]) -> str:
    return ", ".join(repr(key) for key in row) or "no keys"


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
