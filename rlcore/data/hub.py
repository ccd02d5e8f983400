"""Rows of Hugging Face datasets: folders of `Dataset.save_to_disk`, and names on the hub."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.data.rows import JSONL_SUFFIXES, RowFile, check_file, open_rows
from rlcore.errors import DataError

if TYPE_CHECKING:
    import datasets

_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")  # of a data set: "openai/gsm8k"
_SPLIT = re.compile(r":([\w.-]+)$")  # behind a name or folder: "openai/gsm8k:test"
_SAVED = ("state.json", "dataset_dict.json")  # files of a folder of `save_to_disk`


class DatasetRows:
    """A split of a data set, which `datasets` reads from memory-mapped Arrow files."""

    fills_with_null = True

    def __init__(self, name: str, split: datasets.Dataset) -> None:
        self._name = name
        self._split = split

    def __len__(self) -> int:
        return len(self._split)

    def where(self, index: int) -> str:
        """See `RowFile`."""
        return f"{self._name}:{index + 1}"

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._split[index]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._split)


def check_path(path: str) -> None:
    """Refuse a path that is neither a file of rows nor a data set (DataError); reads nothing."""
    path, _ = _without_split(path)
    if not _is_dataset(path):
        check_file(Path(path))
    elif Path(path).is_dir() and not any((Path(path) / name).is_file() for name in _SAVED):
        raise DataError(
            f"data: {path} is a folder without {' or '.join(_SAVED)}; expected a folder of"
            " Dataset.save_to_disk, or name its files one by one"
        )
    else:
        _library(path)


def open_path(path: str, *, subset: str | None, split: str) -> RowFile:
    """Open a file of rows, or a split of a data set.

    Raises:
        DataError: it cannot be read or fetched, has no such split, or `datasets` is missing.
    """
    check_path(path)
    path, own_split = _without_split(path)
    split = own_split or split
    if not _is_dataset(path):
        return open_rows(Path(path))
    library = _library(path)
    try:
        if Path(path).is_dir():
            found = library.load_from_disk(path)
            if isinstance(found, library.DatasetDict):
                if split not in found:
                    raise DataError(
                        f"data: {path} has no split {split!r} (data.split); it has"
                        f" {', '.join(map(repr, found))}"
                    )
                found = found[split]
        else:
            found = library.load_dataset(path, subset, split=split)
    except DataError:
        raise
    # what `datasets` and the hub's client raise: no network, no such name, subset or split
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"data: {path} is no file or folder here, and `datasets` cannot load split {split!r} of"
            f" it{f' (subset {subset})' if subset else ''}: {type(error).__name__}: {reason}. Check"
            " the name, data.subset and data.split; without a network, fetch it elsewhere,"
            " save_to_disk, and give the folder"
        ) from error
    name = ":".join(filter(None, (path, subset, own_split)))
    return DatasetRows(name, found)


def _without_split(path: str) -> tuple[str, str | None]:
    """Return the name or folder of a data set, and the split that the path names itself."""
    found = None if Path(path).exists() else _SPLIT.search(path)
    if found is None or not _is_dataset(path[: found.start()]):
        return path, None
    return path[: found.start()], found[1]


def _is_dataset(path: str) -> bool:
    """Whether a path means a data set: a folder, or a name and no file."""
    if Path(path).is_dir():
        return True
    is_file_name = Path(path).suffix in (".parquet", ".csv", ".txt", *JSONL_SUFFIXES)
    return not Path(path).exists() and not is_file_name and bool(_NAME.fullmatch(path))


def _library(path: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data: {path} is no file of rows; for a Hugging Face dataset install the extra:"
            f" pip install 'rlcore[datasets]' ({error})"
        ) from error
    return datasets
