"""Recorded samples: rollouts/step_000001.parquet, one row a sample, readable by pandas and DuckDB.

    tokens, loss_mask, rollout_logprobs, ...       lists of numbers
    vectors                                        a struct of such lists, by name
    versions, turn_spans                           lists of structs
    reward_parts, outcome, measured                maps from names to numbers
    label, metadata, messages, routed_experts      JSON

Row groups are small, so that one sample can be read without all others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from numpy.typing import NDArray

from rlcore.data.sample import ARRAYS, SAMPLING_MASK_KEY, Sample
from rlcore.errors import DataError
from rlcore.runs.files import sync
from rlcore.runs.sample_index import Scalars, scalars_of
from rlcore.terminal import redacted

Record = dict[str, Any]
LEVEL = 3  # of zstandard compression
MAX_ROWS = 256  # per row group
MAX_TOKENS = 1 << 18  # per row group, unless one sample has more
MAX_BYTES = 2 << 30  # per row group, decompressed: a file must not fill the memory
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS

_FLOATS = pa.large_list(pa.float32())
_INTEGERS = pa.large_list(pa.int32())
_MAP = pa.map_(pa.string(), pa.float64())
_JSON = pa.large_string()


def _spans_of(*names: str) -> Any:
    return pa.large_list(pa.struct([(name, pa.int64()) for name in names]))


# The columns in order, except the vectors.
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
# A record leaves out these keys where they are null.
_ABSENT = ("advantages", "policy_steps", "messages", "vectors")


# --- writing --------------------------------------------------------------------------------------


def write_rollouts(
    path: Path,
    step: int,
    samples: Sequence[Sample],
    advantages: Sequence[NDArray[np.float32]] | None = None,
    *,
    version: int | None = None,
    policy_steps: Mapping[int, int] = MappingProxyType({}),
    vectors: Mapping[str, Sequence[NDArray[np.float32]]] = MappingProxyType({}),
    unscored: Sequence[Sample] = (),
) -> list[Scalars]:
    """Write all samples of `step` to `path`.

    A row is `Sample.to_record()` with `step`, `policy_version`, `policy_steps`, `advantages` and
    `vectors`. The file is written aside and renamed, so a kill never leaves half a file. On return
    it is on disk.

    Args:
        advantages: one array per sample, float32 [m] for its m trainable tokens.
        vectors: further such arrays, by name: log-probs of the trainer, entropy, loss weights, ...
        version: the version of the policy that was trained.
        unscored: further samples, which have neither advantages nor vectors.
        policy_steps: version -> updates behind its weights; written for each version span.

    Returns:
        The scalars of each sample, for an index.
    """
    if advantages is not None and len(advantages) != len(samples):
        raise ValueError(
            f"step {step}: {len(samples)} samples but {len(advantages)} advantage vectors"
        )
    aside = path.with_name(f".{path.name}.tmp")
    scalars: list[Scalars] = []
    trained = len(samples)
    samples = [*samples, *unscored]
    types = dict(TYPES)
    # Parquet has no empty structs.
    if vectors:
        types["vectors"] = pa.struct([(name, _FLOATS) for name in vectors])
    schema = pa.schema([*types.items()])
    floats = [name for name, kind in TYPES.items() if kind == _FLOATS]
    paths = [*floats, *(f"vectors.{name}" for name in vectors)]
    with open(aside, "wb") as file:
        with pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level=LEVEL,
            use_dictionary=["prompt_id", "finish_reason", "prompt_text", "label", "metadata"],
            use_byte_stream_split=[f"{path}.list.element" for path in paths],
            write_page_checksum=True,
        ) as writer:
            for rows in _groups(samples):
                records = []
                for row in rows:
                    given = None if advantages is None or row >= trained else advantages[row]
                    record = _record(step, samples[row], given, version, policy_steps)
                    if vectors and row < trained:
                        record["vectors"] = {name: of[row] for name, of in vectors.items()}
                    records.append(record)
                scalars += map(scalars_of, records)
                writer.write_table(table_of(records, schema), row_group_size=len(records))
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync(path.parent)
    return scalars


def _groups(samples: Sequence[Sample]) -> Iterator[range]:
    """Yield the rows of each row group."""
    first = tokens = 0
    for row, sample in enumerate(samples):
        tokens += len(sample.tokens)
        if row > first and (row - first == MAX_ROWS or tokens > MAX_TOKENS):
            yield range(first, row)
            first = row
            tokens = len(sample.tokens)
    if first < len(samples):
        yield range(first, len(samples))


def _record(
    step: int,
    sample: Sample,
    advantages: NDArray[np.float32] | None,
    version: int | None,
    policy_steps: Mapping[int, int],
) -> Record:
    record = sample.to_record(arrays=True) | {"step": step, "policy_version": version}
    if policy_steps:
        record["policy_steps"] = [policy_steps[span.version] for span in sample.versions]
    if advantages is not None:
        if advantages.shape != (sample.num_trainable,):
            raise ValueError(
                f"step {step}, sample {sample.index} of draw {sample.draw}: advantages of shape"
                f" {advantages.shape}, expected ({sample.num_trainable},)"
            )
        record["advantages"] = advantages
    return record


def table_of(records: Sequence[Record], schema: pa.Schema) -> pa.Table:
    """Make a table of records. Raises ValueError for an unknown column."""
    if unknown := {name for record in records for name in record} - {*schema.names}:
        raise ValueError(f"records with unknown columns: {', '.join(sorted(unknown))}")
    columns = [_column([one.get(field.name) for one in records], field.type) for field in schema]
    return pa.table(columns, schema=schema)


def _column(values: Sequence[Any], kind: Any) -> pa.Array:
    if kind == _JSON:
        # A service's error may quote its key.
        values = [None if value is None else redacted(to_json(value).decode()) for value in values]
    elif kind == _MAP:
        values = [
            [(str(name), float(number)) for name, number in value.items()] for value in values
        ]
    elif pa.types.is_large_list(kind) and pa.types.is_struct(kind.value_type):
        values = [[*map(tuple, spans)] for spans in values]
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        # Half a surrogate pair, which no text file can hold.
        spelled = [value.encode(errors="backslashreplace").decode() for value in values]
        return pa.array(spelled, kind)


def to_json(value: Any) -> bytes:
    """Return a value as JSON; values that JSON does not know become text."""
    try:
        return orjson.dumps(value, default=str, option=_OPTIONS)
    except TypeError:
        # Integers beyond 64 bits, and halves of surrogate pairs.
        text = json.dumps(
            value, default=lambda part: part.tolist() if hasattr(part, "tolist") else str(part)
        )
        return text.encode()


# --- reading --------------------------------------------------------------------------------------


def read_rollouts(path: Path | str, *, arrays: bool = False) -> list[Record]:
    """Read the records of one step.

    `Sample.from_record(record)` gives the sample, `record["advantages"]` its advantages.

    Args:
        arrays: lists of numbers as numpy arrays, which is quicker.

    Raises:
        DataError: the file is missing, damaged or not a rollout file.
    """
    return [record for _, record in read_table(Path(path), arrays=arrays)]


def read_table(
    path: Path,
    *,
    rows: Iterable[int] | None = None,
    columns: Sequence[str] | None = None,
    arrays: bool = False,
) -> Iterator[tuple[int, Record]]:
    """Yield records with their rows, one row group in memory at a time.

    Args:
        rows: default: all rows; rows that the table lacks are left out.
        columns: default: all columns.
        arrays: return lists of numbers as numpy arrays.

    Raises:
        DataError: the file is missing, damaged, or not a table of samples.
    """
    wanted = None if rows is None else np.unique(np.fromiter(rows, dtype=np.int64))
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            first = 0
            for group in range(file.num_row_groups):
                found = file.metadata.row_group(group)
                end = first + found.num_rows
                own = np.arange(first, end)
                if wanted is not None:
                    own = np.intersect1d(own, wanted, assume_unique=True)
                if len(own):
                    if found.total_byte_size > MAX_BYTES:
                        raise ValueError(f"a row group of {found.total_byte_size} bytes")
                    table = file.read_row_group(group, columns=columns, use_threads=False)
                    table = table if wanted is None else table.take(pa.array(own - first))
                    yield from zip(own.tolist(), _records(table, arrays), strict=True)
                first = end
    except (OSError, ValueError, TypeError, KeyError, pa.ArrowException) as error:
        raise DataError(f"{path}: not a readable recording: {error}") from error


def _records(table: pa.Table, arrays: bool) -> list[Record]:
    # A number that does not fit its type is an error.
    types = {
        field.name: pa.struct([(child.name, _FLOATS) for child in field.type])
        if field.name == "vectors"
        else TYPES[field.name]
        for field in table.schema
    }
    table = table.cast(pa.schema([*types.items()]))
    columns = [_values(column.combine_chunks(), arrays) for column in table.columns]
    rows = [dict(zip(table.column_names, row)) for row in zip(*columns)]
    for record in rows:
        for name in _ABSENT:
            if record.get(name, 0) is None:
                del record[name]
    return rows


def _values(column: pa.Array, arrays: bool) -> list[Any]:
    kind = column.type
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        rows = zip(*(_values(child, arrays) for child in column.flatten()))
        return [
            dict(zip(names, row)) if valid else None
            for row, valid in zip(rows, column.is_valid().to_pylist())
        ]
    if pa.types.is_large_list(kind) and not pa.types.is_struct(kind.value_type):
        if column.flatten().null_count:
            raise ValueError("a list with nulls")
        if arrays:
            return [*column.to_numpy(zero_copy_only=False)]
    values = column.to_pylist()
    if kind == _JSON:
        return [None if text is None else json.loads(text) for text in values]
    if kind == _MAP:
        return [None if pairs is None else dict(pairs) for pairs in values]
    if pa.types.is_large_list(kind) and pa.types.is_struct(kind.value_type):
        return [[[*span.values()] for span in spans] for spans in values]
    return list(values)


# --- samples of a checkpoint ----------------------------------------------------------------------


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Encode samples as JSON lines, for a checkpoint's state."""
    lines = []
    for sample in samples:
        record = sample.to_record(arrays=True)
        # Arrays keep the shortest digits of float32: exact, and a third of the size.
        given = [name for name in ARRAYS if record[name] is not None]
        lines.append(to_json(record | {name: np.ascontiguousarray(record[name]) for name in given}))
    packer = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
    return packer.compress(b"\n".join(lines))


def decode_samples(content: bytes) -> list[Sample]:
    """Decode the output of `encode_samples`. Raises ValueError for anything else."""
    try:
        lines = zstandard.ZstdDecompressor().decompress(content)
    except zstandard.ZstdError as error:
        raise ValueError(f"not encoded samples: {error}") from error
    return [Sample.from_record(json.loads(line)) for line in lines.split(b"\n") if line]
