"""Resolves a path into files, patterns, folders, data sets, tasks, and slices of these."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from glob import glob
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.data.paths.reasoning_gym import PREFIX, GymRows, check_gym_path
from rlcore.data.rows import JSONL_SUFFIXES, RowFile, check_file, open_rows
from rlcore.errors import DataError

if TYPE_CHECKING:
    import datasets

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # a data set: "openai/gsm8k"
_SPLIT = re.compile(r":([\w.-]+)$")  # after a name or folder: "openai/gsm8k:test"
_SLICE = re.compile(r"(.+)@\[(-?\d*):(-?\d*)(?::(\d*))?\]")  # "rows.jsonl@[-100:]"
_OTHER_SLICE = re.compile(r"@\[|\[[^\]]*[:%][^\]]*\]$")  # "rows.jsonl@[5]", "gsm8k:train[:10%]"
_PATTERN = re.compile(r"[*?[]")
_NUMBER = re.compile(r"-\d+-of-\d+$")  # the end of a shard's name: "train-00000-of-00002"
_SPLITS = ("train", "test", "validation", "valid", "val", "dev")
_SAVED = ("state.json", "dataset_dict.json")  # files in a folder of `save_to_disk`


class DatasetRows(RowFile):
    """A split of a data set, which `datasets` reads from memory-mapped Arrow files."""

    fills_with_null = True

    def __init__(self, name: str, split: datasets.Dataset) -> None:
        super().__init__(name)
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._split[index]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._split)


class SlicedRows(RowFile):
    """Some of the rows of a file or data set, with their original locations."""

    def __init__(self, path: str, rows: RowFile, wanted: slice) -> None:
        super().__init__(path)
        self._rows = rows
        self._places = range(*wanted.indices(len(rows)))
        self.fills_with_null = rows.fills_with_null
        if not self._places:
            raise DataError(f"{path} selects none of the {len(rows):,} rows that there are")

    def __len__(self) -> int:
        return len(self._places)

    def where(self, index: int) -> str:
        return self._rows.where(self._places[index])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[self._places[index]]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        places = self._places
        return islice(iter(self._rows), places.start, places.stop, places.step)


def _without_slice(path: str) -> tuple[str, slice | None]:
    """Return the path without its slice, and the slice as a Python slice.

    Raises:
        DataError: a slice of another form.
    """
    if Path(path).exists():
        return path, None
    found = _SLICE.fullmatch(path)
    if found is not None and found[4] != "0":
        first, last, step = (int(text) if text else None for text in found.groups()[1:])
        return found[1], slice(first, last, step)
    if _OTHER_SLICE.search(path):
        raise DataError(
            f"{path}: a slice is written PATH@[first:last] or PATH@[first:last:step] as in"
            " Python, in whole rows from 0: rows.jsonl@[-100:] are the last hundred"
        )
    return path, None


def expand(path: str, split: str) -> list[str]:
    """Return the files and data sets that a path stands for, in reading order.

    A pattern stands for its matches, and a folder of shards for its files, both sorted by name. A
    slice applies to one of these. Any other path stands for itself.

    Raises:
        DataError: the path matches nothing, or is ambiguous.
    """
    whole, wanted = _without_slice(path)
    if wanted is not None:
        files = expand(whole, split)
        if len(files) != 1:
            raise DataError(
                f"{path} is a slice of {len(files)} files; give each file its own slice"
            )
        return [files[0] + path[len(whole) :]]
    if "[" in split and (Path(path).exists() or not _is_dataset(path)):
        raise DataError(
            f"data.split: {split!r} is a slice, which goes after a path: {path}@[first:last]"
        )
    if path.startswith(PREFIX):
        return [path]
    if _PATTERN.search(path) and not Path(path).exists():
        files = [match for match in sorted(glob(path, recursive=True)) if Path(match).is_file()]
        if not files:
            raise DataError(f"{path} matches no file")
        return files
    folder, own_split = _without_split(path)
    if not Path(folder).is_dir() or any((Path(folder) / name).is_file() for name in _SAVED):
        return [path]
    return [str(file) for file in _shards(Path(folder), own_split, split)]


def _shards(folder: Path, own_split: str | None, split: str) -> list[Path]:
    """Return the row files in a folder; if they are named after splits, those of one split."""
    kinds = (".parquet", *JSONL_SUFFIXES)
    files = sorted(f for f in folder.iterdir() if f.suffix in kinds and f.name[0] not in "._")
    # A .json file next to shards of another kind, such as dataset_info.json, describes them.
    files = [file for file in files if file.suffix != ".json"] or files
    found = sorted({file.suffix for file in files})
    if len(found) != 1:
        what = f"files of several kinds: {', '.join(found)}" if found else "no files of rows"
        raise DataError(
            f"{folder} holds {what}; expected shards of one kind ({', '.join(kinds)}), or a"
            f" folder of Dataset.save_to_disk; give a pattern, as {folder}/**/*.parquet"
        )
    splits = {file: _NUMBER.sub("", file.stem) for file in files}
    wanted = own_split or split
    chosen = [file for file in files if splits[file] == wanted]
    others = sorted(set(splits.values()) & set(_SPLITS))
    if not chosen and (others or own_split):
        raise DataError(
            f"{folder} has no files of the split {wanted!r} (data.split, or {folder}:SPLIT);"
            f" it has {', '.join(map(repr, sorted(set(splits.values()))))}"
        )
    return chosen or files


def check_path(path: str) -> None:
    """Refuse a path that is not a row file, data set or task (DataError); reads nothing.

    Args:
        path: as `expand` returns it.
    """
    path, _ = _without_slice(path)
    if path.startswith(PREFIX):
        check_gym_path(path)
        return
    path, _ = _without_split(path)
    if not _is_dataset(path):
        check_file(Path(path))
    # The import itself would take seconds.
    elif sys.modules.get("datasets", ...) is None or find_spec("datasets") is None:
        raise DataError(
            f"{path} is no file of rows; for a Hugging Face dataset install the extra:"
            " pip install 'rlcore[datasets]'"
        )


def open_path(path: str, *, subset: str | None, split: str) -> RowFile:
    """Open a row file, a split of a data set, a reasoning-gym task, or a slice of these.

    Args:
        path: as `expand` returns it.

    Raises:
        DataError: the path cannot be read or fetched, has no such split, or `datasets` is missing.
    """
    whole, wanted = _without_slice(path)
    if wanted is not None:
        return SlicedRows(path, open_path(whole, subset=subset, split=split), wanted)
    if path.startswith(PREFIX):
        return GymRows(path)
    check_path(path)
    path, own_split = _without_split(path)
    split = own_split or split
    if not _is_dataset(path):
        return open_rows(Path(path))
    import datasets as library

    try:
        if Path(path).is_dir():
            found = library.load_from_disk(path)
            if isinstance(found, library.DatasetDict):
                if split not in found:
                    raise DataError(
                        f"{path} has no split {split!r} (data.split); it has"
                        f" {', '.join(map(repr, found))}"
                    )
                found = found[split]
        else:
            found = library.load_dataset(path, subset, split=split)
    except DataError:
        raise
    # Errors of `datasets` and the hub's client: no network, or an unknown name, subset or split.
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{path} is no file or folder here, and `datasets` cannot load split {split!r} of"
            f" it{f' (subset {subset})' if subset else ''}: {type(error).__name__}: {reason}. Check"
            " the name, data.subset and data.split; without a network, fetch it elsewhere,"
            " save_to_disk, and give the folder"
        ) from error
    name = ":".join(filter(None, (path, subset, own_split)))
    return DatasetRows(name, found)


def _without_split(path: str) -> tuple[str, str | None]:
    """Return the name or folder of a data set, and the split in the path itself, if any."""
    found = None if Path(path).exists() else _SPLIT.search(path)
    if found is None or not _is_dataset(path[: found.start()]):
        return path, None
    return path[: found.start()], found[1]


def _is_dataset(path: str) -> bool:
    """Whether a path is a data set: a folder, or a name that is not a file."""
    if Path(path).is_dir():
        return True
    is_file_name = Path(path).suffix in (".parquet", ".csv", ".txt", *JSONL_SUFFIXES)
    return not Path(path).exists() and not is_file_name and bool(_NAME.fullmatch(path))
