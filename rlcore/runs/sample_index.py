"""The scalars of recorded samples: index/step_000001.parquet, a row for each sample of the step.

`rlcore view` finds samples in these small tables, without reading texts and tokens. The tables stay
when `tracking.keep_rollouts` deletes a step's recording. Every `MERGED` steps are copied into one
table, index/merged/step_000100.parquet, because opening a file takes longer than reading it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rlcore.data.sample import Branch, branches_of, verdict_in, verdict_word
from rlcore.runs.files import sync, write_atomic

# The scalars of one sample, by column; None where a value does not exist.
Scalars = dict[str, Any]

MERGED = 100  # steps per merged table
MERGED_ROWS = 1 << 17  # approximate rows per row group: smaller groups are slower to read
NAMED = ("verdict", "finish", "source")  # columns of repeating texts
COLUMNS: Mapping[str, Any] = {
    "step": pa.int64(),
    # The row in the step's recording.
    "row": pa.int32(),
    "draw": pa.int64(),
    "index": pa.int32(),
    "prompt_id": pa.string(),
    "reward": pa.float64(),
    # The number of trainable tokens.
    "length": pa.int32(),
    # The number of all tokens.
    "tokens": pa.int32(),
    # The number of trainable tokens whose loss weight is not 0.
    "trained": pa.int32(),
    "turns": pa.int32(),
    # Steps between the weights that made the oldest token and the trained weights.
    "staleness": pa.float64(),
    # Means over tokens; `gap` is the mean of |log-prob of the trainer - of the engine|.
    **dict.fromkeys(("advantage", "entropy", "gap"), pa.float64()),
    # The rollout in the draw, the branch in the rollout (from 1), and the branches in this step.
    **dict.fromkeys(Branch._fields, pa.int32()),
    # 1: all samples of the group, at least two, have the same reward.
    "flat": pa.int8(),
    # 1: the reward failed.
    "error": pa.int8(),
    **dict.fromkeys(NAMED, pa.string()),
    # The parts of the reward.
    "parts": pa.map_(pa.string(), pa.float64()),
}


def write_index(path: Path, step: int, samples: Sequence[Scalars]) -> None:
    """Write the scalars of a step, in the order of its recording, in one rename."""
    branches = branches_of((sample["draw"], sample["rollout_id"]) for sample in samples)
    rows = [
        {**sample, **branch._asdict(), "step": step, "row": row, "flat": flat}
        for row, (sample, branch, flat) in enumerate(zip(samples, branches, flat_groups(samples)))
    ]
    columns = [pa.array([row[name] for row in rows], kind) for name, kind in COLUMNS.items()]
    table = pa.table(columns, schema=pa.schema([*COLUMNS.items()]))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, sink.getvalue().to_pybytes())


def merge_tables(target: Path, tables: Sequence[Path]) -> None:
    """Copy several tables of scalars into one, in one rename."""
    target.parent.mkdir(exist_ok=True)
    aside = target.with_name(f".{target.name}.tmp")
    group: list[pa.Table] = []
    with pq.ParquetWriter(aside, pa.schema([*COLUMNS.items()]), compression="zstd") as writer:
        for path in tables:
            group.append(pq.read_table(path))
            if path is tables[-1] or sum(map(len, group)) >= MERGED_ROWS:
                writer.write_table(pa.concat_tables(group))
                group = []
    sync(aside)
    os.replace(aside, target)


def scalars_of(record: Mapping[str, Any]) -> Scalars:
    """Return the scalars of a recorded sample (see `rlcore.runs.rollouts`)."""
    engine = np.asarray(record["rollout_logprobs"], dtype=np.float32)
    vectors = record.get("vectors") or {}
    metadata = record.get("metadata") or {}
    logprobs = vectors.get("logprobs")
    weights = vectors.get("weights")
    gap = None if logprobs is None else np.abs(np.asarray(logprobs, dtype=np.float32) - engine)
    # How many steps the oldest token lags behind.
    staleness = None
    if record["versions"] and (steps := record.get("policy_steps")):
        staleness = float(int(record["step"]) - 1 - min(steps))
    elif record["versions"] and record.get("policy_version") is not None:
        staleness = float(record["policy_version"] - min(span[0] for span in record["versions"]))
    return {
        "draw": int(record["draw"]),
        "index": int(record["index"]),
        "rollout_id": int(record["rollout_id"]),
        "prompt_id": _text(record["prompt_id"]),
        "reward": _number(record["reward"]),
        "length": len(engine),
        "tokens": len(record["tokens"]),
        "trained": len(engine) if weights is None else int(np.count_nonzero(weights)),
        "turns": int(record.get("turns", 1)),
        "staleness": staleness,
        "advantage": _mean(record.get("advantages")),
        "entropy": _mean(vectors.get("entropy")),
        "gap": _mean(gap),
        "error": int("reward_error" in metadata),
        "verdict": verdict_word(verdict_in(metadata, float(record["reward"]))),
        "finish": _text(record["finish_reason"]),
        "source": _text(metadata.get("source", "")),
        "parts": [
            (_text(name), _number(value))
            for name, value in (record.get("reward_parts") or {}).items()
        ],
    }


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _text(value: object) -> str:
    # Half a surrogate pair, which no text file can hold, is spelled out.
    return str(value).encode(errors="backslashreplace").decode()


def _mean(values: Any) -> float | None:
    return None if values is None or len(values) == 0 else _number(float(np.mean(values)))


def flat_groups(samples: Sequence[Scalars]) -> Iterator[int]:
    """Yield 1 for each sample of a group of several samples with equal rewards, else 0."""
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        # A reward of None has failed.
        if sample["reward"] is not None:
            rewards.setdefault(sample["draw"], []).append(sample["reward"])
    flat = {draw for draw, found in rewards.items() if len(found) > 1 and min(found) == max(found)}
    yield from (int(sample["draw"] in flat) for sample in samples)
