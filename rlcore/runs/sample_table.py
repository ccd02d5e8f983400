"""Recorded samples as a Parquet table, one row a sample, for pandas and DuckDB as it is.

    tokens, loss_mask, rollout_logprobs, ...       lists of numbers
    vectors                                        a struct of such lists, by name
    versions, turn_spans                           lists of structs
    reward_parts, outcome, measured                maps from names to numbers
    label, metadata, messages, routed_experts      JSON

Row groups are small, so that a sample is found without reading all others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.data.sample import SAMPLING_MASK_KEY
from rlcore.errors import DataError
from rlcore.terminal import redacted

Record = dict[str, Any]
LEVEL = 3  # of zstandard
MOST_BYTES = 2 << 30  # of a row group, decompressed: a file must not fill the memory
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS

_FLOATS = pa.large_list(pa.float32())
_INTEGERS = pa.large_list(pa.int32())
_MAP = pa.map_(pa.string(), pa.float64())
_JSON = pa.large_string()


def _spans_of(*names: str) -> Any:
    return pa.large_list(pa.struct([(name, pa.int64()) for name in names]))


# The columns in order, but for the vectors.
TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("step", "policy_version", "draw", "index"), pa.int64()),
    **dict.fromkeys(("group_id", "rollout_id", "turns"), pa.int64()),
    **dict.fromkeys(("reward", "baseline_reward"), pa.float64()),
    **dict.fromkeys(("prompt_id", "finish_reason", "prompt_text", "response_text"), pa.string()),
    **dict.fromkeys(("reward_parts", "outcome", "measured"), _MAP),
    "tokens": _INTEGERS,
    "loss_mask": pa.large_list(pa.uint8()),
    **dict.fromkeys(("rollout_logprobs", "token_rewards", "advantages"), _FLOATS),
    "policy_steps": pa.large_list(pa.int64()),
    "versions": _spans_of("version", "start", "end"),
    "turn_spans": _spans_of("turn", "message", "start", "end"),
    **dict.fromkeys(("label", "metadata", "messages", "routed_experts"), _JSON),
    SAMPLING_MASK_KEY: pa.struct([("tokens", _INTEGERS), ("counts", _INTEGERS)]),
}
# Where these are null, a record has no such key.
_ABSENT = ("advantages", "policy_steps", "messages", "vectors")


class TableWriter:
    """Writes records to an open file. Every call of `write` makes a row group.

    Args:
        vectors: names of the vectors that every record has.
    """

    def __init__(self, file: IO[bytes], vectors: Sequence[str]) -> None:
        self._types = dict(TYPES)
        if vectors:  # Parquet has no empty structs
            self._types["vectors"] = pa.struct([(name, _FLOATS) for name in vectors])
        floats = [name for name, kind in TYPES.items() if kind == _FLOATS]
        paths = [*floats, *(f"vectors.{name}" for name in vectors)]
        self._writer = pq.ParquetWriter(
            file,
            pa.schema(list(self._types.items())),
            compression="zstd",
            compression_level=LEVEL,
            use_dictionary=["prompt_id", "finish_reason", "prompt_text", "label", "metadata"],
            use_byte_stream_split=[f"{path}.list.element" for path in paths],
            write_page_checksum=True,
        )

    def write(self, records: Sequence[Record]) -> None:
        """Append records, in order."""
        unknown = {name for record in records for name in record} - {*self._types}
        if unknown:
            raise ValueError(f"records with unknown columns: {', '.join(sorted(unknown))}")
        columns = [
            _column([record.get(name) for record in records], kind)
            for name, kind in self._types.items()
        ]
        table = pa.table(columns, schema=self._writer.schema)
        self._writer.write_table(table, row_group_size=len(records))

    def close(self) -> None:
        """Write the end of the table; the file stays open."""
        self._writer.close()


def _column(values: Sequence[Any], kind: Any) -> pa.Array:
    if kind == pa.string():
        return _texts(values)
    if kind == _JSON:
        # an error of a service may quote its key
        texts = (None if value is None else redacted(to_json(value).decode()) for value in values)
        return pa.array(texts, kind)
    if kind == _MAP:
        return pa.array([None if value is None else _pairs(value) for value in values], kind)
    if pa.types.is_struct(kind):
        return _struct(values, kind)
    if not pa.types.is_large_list(kind):
        return pa.array(values, kind)
    return (_spans if pa.types.is_struct(kind.value_type) else _lists)(values, kind)


def to_json(value: Any) -> bytes:
    """Return a value as JSON; what JSON does not know becomes its text."""
    try:
        return orjson.dumps(value, default=str, option=_OPTIONS)
    except TypeError:  # integers beyond 64 bits, and halves of surrogate pairs
        return json.dumps(value, default=_jsonable).encode()


def _jsonable(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


def _texts(values: Sequence[str]) -> pa.Array:
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:  # half a surrogate pair, which no file of text can hold
        spelled = [value.encode(errors="backslashreplace").decode() for value in values]
        return pa.array(spelled, pa.string())


def _pairs(value: Mapping[str, float]) -> list[tuple[str, float]]:
    return [(str(name), float(number)) for name, number in value.items()]


def _lists(values: Sequence[Any], kind: Any) -> pa.Array:
    """Return a column of lists; the numbers of all rows are copied once."""
    dtype = kind.value_type.to_pandas_dtype()
    parts = [np.zeros(0, dtype) if value is None else np.asarray(value) for value in values]
    flat = np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype, copy=False)
    return _split(pa.array(flat, kind.value_type), list(map(len, parts)), _mask(values))


def _spans(values: Sequence[Sequence[Sequence[int]]], kind: Any) -> pa.Array:
    names = [field.name for field in kind.value_type]
    flat = np.array([span for value in values for span in value], dtype=np.int64)
    columns = flat.reshape(-1, len(names)).T
    spans = pa.StructArray.from_arrays([pa.array(column) for column in columns], names=names)
    return _split(spans, list(map(len, values)), None)


def _struct(values: Sequence[Mapping[str, Any] | None], kind: Any) -> pa.Array:
    """Return a column of structs of lists."""
    lists = [
        _lists([() if value is None else value[field.name] for value in values], field.type)
        for field in kind
    ]
    return pa.StructArray.from_arrays(lists, fields=[*kind], mask=_mask(values))


def _split(flat: pa.Array, lengths: Sequence[int], mask: pa.Array | None) -> pa.Array:
    offsets = pa.array(np.cumsum([0, *lengths]), pa.int64())
    return pa.LargeListArray.from_arrays(offsets, flat, mask=mask)


def _mask(values: Sequence[Any]) -> pa.Array:
    return pa.array([value is None for value in values], pa.bool_())


# --- reading --------------------------------------------------------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what a missing or damaged file raises into a DataError that names it."""
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable recording: {error}") from error


def read_table(
    path: Path,
    *,
    rows: Iterable[int] | None = None,
    columns: Sequence[str] | None = None,
    arrays: bool = False,
) -> Iterator[tuple[int, Record]]:
    """Yield records with their rows, a row group in memory at a time.

    Args:
        rows: default: all of them; rows that the table lacks are left out.
        columns: default: all of them.
        arrays: lists of numbers as numpy arrays.

    Raises:
        DataError: the file is missing, damaged, or no table of samples.
    """
    wanted = None if rows is None else np.unique(np.fromiter(rows, dtype=np.int64))
    with _reading(path), pq.ParquetFile(path, page_checksum_verification=True) as file:
        first = 0
        for group in range(file.num_row_groups):
            found = file.metadata.row_group(group)
            end = first + found.num_rows
            own = None if wanted is None else wanted[(wanted >= first) & (wanted < end)]
            if own is None or len(own):
                if found.total_byte_size > MOST_BYTES:
                    raise ValueError(f"a row group of {found.total_byte_size} bytes")
                table = file.read_row_group(group, columns=columns, use_threads=False)
                at = range(first, end) if own is None else own.tolist()
                table = table if own is None else table.take(pa.array(own - first))
                yield from zip(at, _records(table, arrays), strict=True)
            first = end


def _records(table: pa.Table, arrays: bool) -> list[Record]:
    # Numbers that do not fit their type are an error.
    table = table.cast(pa.schema([(field.name, _type_of(field)) for field in table.schema]))
    columns = {
        name: _values(table.column(name).combine_chunks(), arrays) for name in table.column_names
    }
    rows = [dict(zip(columns, row)) for row in zip(*columns.values())]
    for record in rows:
        for name in _ABSENT:
            if record.get(name, 0) is None:
                del record[name]
    return rows


def _type_of(field: Any) -> Any:
    if field.name != "vectors":
        return TYPES[field.name]
    return pa.struct([(child.name, _FLOATS) for child in field.type])


def _values(column: pa.Array, arrays: bool) -> list[Any]:
    kind = column.type
    if kind == _JSON:
        return [None if text is None else json.loads(text) for text in column.to_pylist()]
    if kind == _MAP:
        return [None if pairs is None else dict(pairs) for pairs in column.to_pylist()]
    if pa.types.is_struct(kind):
        parts = [_unpacked(child, arrays) for child in column.flatten()]
        names = [field.name for field in kind]
        rows = [dict(zip(names, row)) for row in zip(*parts)]
        return [row if valid else None for row, valid in zip(rows, column.is_valid().to_pylist())]
    if not pa.types.is_large_list(kind):
        return list(column.to_pylist())
    if not pa.types.is_struct(kind.value_type):
        return _unpacked(column, arrays)
    children = [column.values.field(i) for i in range(kind.value_type.num_fields)]
    lists = [pa.LargeListArray.from_arrays(column.offsets, child) for child in children]
    spans = zip(*(_unpacked(one, arrays=True) for one in lists))
    return [np.stack(row, axis=1).tolist() for row in spans]


def _unpacked(column: pa.Array, arrays: bool) -> list[Any]:
    """Return the lists of numbers of a column."""
    flat = column.flatten()
    if flat.null_count:
        raise ValueError("a list with empty places")
    numbers = flat.to_numpy()
    lengths = column.value_lengths().fill_null(0).to_numpy()
    parts = [numbers[start:end] for start, end in pairwise([0, *np.cumsum(lengths).tolist()])]
    given: Iterable[Any] = parts if arrays else (part.tolist() for part in parts)
    return [part if valid else None for part, valid in zip(given, column.is_valid().to_pylist())]
