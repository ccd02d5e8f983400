"""Recorded samples: rollouts/step_000001.parquet, a row for each sample (sample_table.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from rlcore.data.sample import ARRAYS, Sample
from rlcore.runs.files import sync
from rlcore.runs.sample_index import Scalars, scalars_of
from rlcore.runs.sample_table import LEVEL, TableWriter, read_table, to_json

MAX_ROWS = 256  # of a row group
MAX_TOKENS = 1 << 18  # likewise, unless one sample has more


def write_rollouts(
    path: Path,
    step: int,
    samples: Sequence[Sample],
    advantages: Sequence[NDArray[np.float32]] | None = None,
    *,
    version: int | None = None,
    policy_steps: Mapping[int, int] = MappingProxyType({}),
    vectors: Mapping[str, Sequence[NDArray[np.float32]]] = MappingProxyType({}),
    untrained: Sequence[Sample] = (),
) -> list[Scalars]:
    """Write all samples of `step` to `path`.

    A row is `Sample.to_record()` with `step`, `policy_version`, `policy_steps`, `advantages` and
    `vectors`. The file is written aside and renamed: a kill leaves no half file. It is on the disk
    on return.

    Args:
        advantages: of each sample, float32 [m] for its m trainable tokens.
        vectors: more of these, by name: log-probs of the trainer, entropy, loss weights, ...
        version: of the policy that was trained.
        untrained: further samples, which have neither advantages nor vectors.
        policy_steps: version -> updates behind those weights; written for each span of versions.

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
    samples = [*samples, *untrained]
    with open(aside, "wb") as file:
        table = TableWriter(file, [*vectors])
        for rows in _groups(samples):
            records = []
            for row in rows:
                given = None if advantages is None or row >= trained else advantages[row]
                record = _record(step, samples[row], given, version, policy_steps)
                if vectors and row < trained:
                    record["vectors"] = {name: of[row] for name, of in vectors.items()}
                records.append(record)
            scalars += map(scalars_of, records)
            table.write(records)
        table.close()
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


def read_rollouts(path: Path | str, *, arrays: bool = False) -> list[dict[str, Any]]:
    """Read the records of one step.

    `Sample.from_record(record)` gives the sample, `record["advantages"]` its advantages.

    Args:
        arrays: lists of numbers as numpy arrays, which is quicker.

    Raises:
        DataError: the file is missing, damaged or not a rollout file.
    """
    return [record for _, record in read_table(Path(path), arrays=arrays)]


def encode_samples(samples: Sequence[Sample]) -> bytes:
    """Encode samples that no step was trained on yet, as JSON lines, for a checkpoint's state."""
    lines = b"".join(to_json(_contiguous(one.to_record(arrays=True))) + b"\n" for one in samples)
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(lines)


def decode_samples(content: bytes) -> list[Sample]:
    """Decode what `encode_samples` made; ValueError for anything else."""
    try:
        lines = zstandard.ZstdDecompressor().decompress(content)
    except zstandard.ZstdError as error:
        raise ValueError(f"not encoded samples: {error}") from error
    return [Sample.from_record(json.loads(line)) for line in lines.split(b"\n") if line]


def _contiguous(record: dict[str, Any]) -> dict[str, Any]:
    # From arrays, float32 is written with its own shortest digits: a third of the size, and exact.
    return record | {
        name: np.ascontiguousarray(record[name]) for name in ARRAYS if record[name] is not None
    }


def _record(
    step: int,
    sample: Sample,
    advantages: NDArray[np.float32] | None,
    version: int | None,
    policy_steps: Mapping[int, int],
) -> dict[str, Any]:
    record = sample.to_record(arrays=True) | {"step": step, "policy_version": version}
    if policy_steps:
        record["policy_steps"] = [policy_steps[span.version] for span in sample.versions]
    if advantages is not None:
        if advantages.shape != (sample.num_trainable,):
            raise ValueError(
                f"step {step}, sample {sample.index} of draw {sample.draw}: advantages of shape"
                f" {advantages.shape}, expected ({sample.num_trainable},)"
            )
        record["advantages"] = np.ascontiguousarray(advantages, dtype=np.float32)
    return record
