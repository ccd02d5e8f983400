"""The scalars of recorded samples in columns, so that samples are found without reading texts.

index/journal.jsonl   one line for each column, name, step and rewind
      000.bin ...     the numbers of one column, little-endian, one a sample

A line about a step is written once all columns have its samples; what lies behind is garbage of a
kill, and is written over. A rewind is a line too: files are never shortened, for a reader may have
mapped them. Of two lines about a step the later one counts.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rlcore.data.sample import Branch, branches_of, verdict_in, verdict_word
from rlcore.errors import DataError
from rlcore.runs.files import cut_torn_line

Scalars = dict[str, Any]  # of one sample: numbers and texts, by column; "parts" is a map
Column = NDArray[Any]

JOURNAL = "journal.jsonl"
PART = "part."  # begins the name of a column with one part of the reward
CHECKED_BLOCKS = 16  # newest ones, of which a failing machine may have lost what it had promised
_FILLED_AT_ONCE = 1 << 20
# Bounds what a reward that makes up names can do to the number of files.
MOST_COLUMNS = 200
MOST_NAMES = 60_000
COLUMNS: Mapping[str, str] = {
    "draw": "<i8",
    "index": "<i4",
    "prompt": "<u8",  # `prompt_number` of the prompt's id
    "reward": "<f4",
    "length": "<i4",  # trainable tokens
    "tokens": "<i4",  # all of them
    "trained": "<i4",  # trainable tokens whose loss weight is not 0
    "turns": "<i4",
    "staleness": "<f4",  # steps between the weights of the oldest token and those trained
    "advantage": "<f4",  # mean over tokens
    "entropy": "<f4",  # likewise
    "gap": "<f4",  # likewise, |log-prob of the trainer - of the engine|
    "rollout": "<i4",  # of the draw
    "branch": "<i4",  # of the rollout, from 1
    "branches": "<i4",  # that the rollout has in this step
    "flat": "<u1",  # 1: a group of several samples whose rewards are all equal
    "error": "<u1",  # 1: the reward failed
    "verdict": "<u2",  # number of a name: "right", "wrong" or ""
    "finish": "<u2",  # likewise
    "source": "<u2",  # likewise
}
NAMED = ("verdict", "finish", "source")  # columns that hold numbers of names


def prompt_number(prompt_id: str) -> int:
    """Return 64 bits by which a column finds the samples of a prompt."""
    return int.from_bytes(hashlib.blake2b(prompt_id.encode(), digest_size=8).digest(), "little")


def scalars_of(record: Mapping[str, Any]) -> Scalars:
    """Return the scalars of a recorded sample, see `rlcore.runs.rollouts`."""
    engine = np.asarray(record["rollout_logprobs"], dtype=np.float32)
    vectors = record.get("vectors") or {}
    metadata = record.get("metadata") or {}
    logprobs = vectors.get("logprobs")
    weights = vectors.get("weights")
    return {
        "draw": int(record["draw"]),
        "index": int(record["index"]),
        "rollout_id": int(record["rollout_id"]),
        "prompt": prompt_number(str(record["prompt_id"])),
        "reward": float(record["reward"]),
        "length": len(engine),
        "tokens": len(record["tokens"]),
        "trained": len(engine) if weights is None else int(np.count_nonzero(weights)),
        "turns": int(record.get("turns", 1)),
        "staleness": _staleness(record),
        "advantage": _mean(record.get("advantages")),
        "entropy": _mean(vectors.get("entropy")),
        "gap": math.nan
        if logprobs is None
        else _mean(np.abs(np.asarray(logprobs, dtype=np.float32) - engine)),
        "error": int("reward_error" in metadata),
        "verdict": verdict_word(verdict_in(metadata, float(record["reward"]))),
        "finish": str(record["finish_reason"]),
        "source": str(metadata.get("source", "")),
        "parts": {str(name): float(v) for name, v in (record.get("reward_parts") or {}).items()},
    }


def _mean(values: Any) -> float:
    return math.nan if values is None or len(values) == 0 else float(np.mean(values))


def _staleness(record: Mapping[str, Any]) -> float:
    """Return the steps behind of the oldest token; NaN where nothing tells."""
    if not record["versions"]:
        return math.nan
    if steps := record.get("policy_steps"):
        return float(int(record["step"]) - 1 - min(steps))
    if record.get("policy_version") is None:
        return math.nan
    return float(record["policy_version"] - min(span[0] for span in record["versions"]))


@dataclass(frozen=True)
class Block:
    """The rows of one step in every column."""

    first: int
    rows: int
    file_bytes: int  # of the step's recording: another size means another recording
    checksum: int


@dataclass
class SampleIndex:
    """Reads an index, also one that is being written; `refresh` finds what was added."""

    folder: Path
    blocks: dict[int, Block] = field(default_factory=dict)  # by step
    columns: dict[str, str] = field(default_factory=dict)  # name -> type, in order of their files
    names: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in NAMED})
    end: int = 0  # rows that some line knows of, those of rewound steps too
    _read: int = 0  # bytes of the journal
    _inode: int = 0
    _tail: bytes = b""  # the last line read
    _maps: dict[str, Column] = field(default_factory=dict)

    def refresh(self) -> None:
        """Read the lines that were added. An index that was deleted and begun anew is seen.

        Raises:
            DataError: a line of the journal makes no sense.
        """
        path = self.folder / JOURNAL
        if path.is_symlink() or not path.is_file():
            self._forget()
            return
        with open(path, "rb") as file:
            inode = path.stat().st_ino
            file.seek(self._read - len(self._tail))
            # a new file may have the number of the one that was deleted
            if inode != self._inode or file.read(len(self._tail)) != self._tail:
                self._forget()
                self._inode = inode
            file.seek(self._read)
            added = file.read()
        whole = added[: added.rfind(b"\n") + 1]
        for line in whole.splitlines():
            try:
                self._take(orjson.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(
                    f"{path}: not a line of an index: {line[:80].decode(errors='replace')!r}"
                    f" ({error}); delete the folder {self.folder}, it can be made again"
                ) from error
            self._tail = line + b"\n"
        self._read += len(whole)

    def _forget(self) -> None:
        self.__init__(self.folder)  # type: ignore[misc]

    def _take(self, line: dict[str, Any]) -> None:
        if "column" in line:
            name = line["column"]
            if not isinstance(name, str) or line["type"] not in {*COLUMNS.values()}:
                raise ValueError("no such column")
            self.columns[name] = line["type"]
        elif "name" in line:
            self.names[line["of"]].append(str(line["name"]))
        elif "rewind" in line:
            kept = int(line["rewind"])
            self.blocks = {step: block for step, block in self.blocks.items() if step <= kept}
        else:
            numbers = [line[key] for key in ("step", "first", "rows", "bytes", "crc")]
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise ValueError("expected whole numbers")
            step, *block = numbers
            self.blocks.pop(step, None)  # its place in order is the newest line's
            self.blocks[step] = Block(*block)
            self.end = max(self.end, self.blocks[step].first + self.blocks[step].rows)

    def path_of(self, name: str) -> Path:
        """Return the file of a column."""
        return self.folder / f"{list(self.columns).index(name):03d}.bin"

    def column(self, name: str) -> Column:
        """Map a column's file; it holds `end` rows, and those of a block are at its `first`.

        Raises:
            DataError: the file is missing, a link, or too short.
        """
        mapped = self._maps.get(name)
        if mapped is None or len(mapped) < self.end:
            path = self.path_of(name)
            width = np.dtype(self.columns[name]).itemsize
            if path.is_symlink() or not path.is_file() or path.stat().st_size < self.end * width:
                raise DataError(f"{path}: the column {name!r} of the index is missing or too short")
            mapped = np.memmap(path, dtype=self.columns[name], mode="r", shape=(self.end,))
            self._maps[name] = mapped
        return mapped

    def damaged(self) -> list[int]:
        """Return which of the newest steps do not hold what their line promises."""
        newest = list(self.blocks.items())[-CHECKED_BLOCKS:]
        return [step for step, block in newest if self._checksum(block) != block.checksum]

    def _checksum(self, block: Block) -> int:
        rows = slice(block.first, block.first + block.rows)
        try:
            return checksum_of({name: self.column(name)[rows] for name in COLUMNS})
        # recovery: the step's samples are indexed again
        except (DataError, KeyError):
            return -1


def checksum_of(columns: Mapping[str, Column]) -> int:
    """Return a checksum over the columns that every index has."""
    found = 0
    for name in COLUMNS:
        found = zlib.crc32(np.ascontiguousarray(columns[name]).tobytes(), found)
    return found


class IndexWriter:
    """Appends to the index of a run. There is one writer at a time, as of the run itself."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        self.folder = folder
        if (folder / JOURNAL).exists():
            cut_torn_line(folder / JOURNAL)
        self.index = SampleIndex(folder)
        self.index.refresh()
        for name, kind in COLUMNS.items():
            if name not in self.index.columns:
                self._add_column(name, kind)

    def append(self, step: int, file_bytes: int, samples: Sequence[Scalars]) -> None:
        """Add the samples of a step, in the order of its recording.

        Args:
            file_bytes: size of the recording.
        """
        self.append_columns(step, file_bytes, self.columns_of(samples))

    def append_columns(self, step: int, file_bytes: int, columns: Mapping[str, Column]) -> None:
        """Add what `columns_of` has made."""
        first = self.index.end
        for name, values in columns.items():
            _write_at(self.index.path_of(name), first * values.itemsize, values)
        checksum = checksum_of(columns)
        self._say(
            {"step": step, "first": first, "rows": len(columns["draw"]), "bytes": file_bytes}
            | {"crc": checksum}
        )

    def rewind(self, step: int) -> None:
        """Forget later steps, and those whose samples a failure of the machine has lost."""
        if any(known > step for known in self.index.blocks):
            self._say({"rewind": step})
        if lost := self.index.damaged():
            self._say({"rewind": min(lost) - 1})

    def columns_of(self, samples: Sequence[Scalars]) -> dict[str, Column]:
        """Return the samples by column; new names and parts of the reward get their place."""
        made: dict[str, Column] = {}
        branches = branches_of((sample["draw"], sample["rollout_id"]) for sample in samples)
        of_step: dict[str, Iterable[Any]] = {"flat": flat_groups(samples)}
        of_step |= zip(Branch._fields, zip(*branches)) if branches else {}
        for name, kind in COLUMNS.items():
            values = of_step.get(name) or (sample[name] for sample in samples)
            if name in NAMED:
                values = [self._number(name, text) for text in values]
            made[name] = np.array([*values], dtype=kind)
        for part in dict.fromkeys(part for sample in samples for part in sample["parts"]):
            if PART + part not in self.index.columns and len(self.index.columns) < MOST_COLUMNS:
                self._add_column(PART + part, "<f4")
        for name in self.index.columns:
            if name.startswith(PART):
                own = name.removeprefix(PART)
                given = [sample["parts"].get(own, math.nan) for sample in samples]
                made[name] = np.array(given, dtype="<f4")
        return made

    def _number(self, of: str, name: str) -> int:
        names = self.index.names[of]
        if name not in names:
            if len(names) >= MOST_NAMES:
                return len(names) - 1
            self._say({"of": of, "name": name})
        return names.index(name)

    def _add_column(self, name: str, kind: str) -> None:
        """Begin a column; what came before it is NaN, or 0 for whole numbers."""
        path = self.folder / f"{len(self.index.columns):03d}.bin"
        dtype = np.dtype(kind)
        missing = math.nan if dtype.kind == "f" else 0
        with open(path, "wb") as file:
            for start in range(0, self.index.end, _FILLED_AT_ONCE):
                rows = min(_FILLED_AT_ONCE, self.index.end - start)
                file.write(np.full(rows, missing, dtype=dtype).tobytes())
        self._say({"column": name, "type": kind})

    def _say(self, line: Mapping[str, Any]) -> None:
        with open(self.folder / JOURNAL, "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")
        self.index.refresh()


def flat_groups(samples: Sequence[Scalars]) -> Iterator[int]:
    """Yield 1 for each sample of a group of several whose rewards are all equal, else 0."""
    rewards: dict[int, list[float]] = {}
    for sample in samples:
        if not math.isnan(sample["reward"]):  # else its reward failed
            rewards.setdefault(sample["draw"], []).append(sample["reward"])
    flat = {draw for draw, found in rewards.items() if len(found) > 1 and min(found) == max(found)}
    yield from (int(sample["draw"] in flat) for sample in samples)


def _write_at(path: Path, offset: int, values: Column) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(values.tobytes())
