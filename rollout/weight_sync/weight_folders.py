"""Numbered folders of weights that engines read: each is whole or absent, and goes when no engine needs it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcore.errors import RunFailed
from rlcore.hf_folder import ShardWriter, copy_companions, header, write_json
from rlcore.runs.files import remove_tree
from rlcore.weights import Bucket

_NAME = re.compile(r"update_(\d{6,})")


class WeightFolders:
    """`root/update_000001`, `update_000002`, ...: written aside and renamed. Numbers go on where an earlier run stopped.

    Nothing is forced onto the disk: these files serve engines that run now, and a machine that loses its power restarts both
    sides from a checkpoint.

    Args:
        model: the Hugging Face folder whose config.json goes along. tokenizer: likewise for the tokenizer's files.

    Raises RunFailed, naming folder and bytes, where the system refuses.
    """

    def __init__(self, root: Path, *, model: Path, tokenizer: Path | None = None) -> None:
        self.root, self._model, self._tokenizer = root.absolute(), model, tokenizer or model
        self.last = max((number_of(path) for path in published(self.root)), default=0)

    def begin(self, num_bytes: int) -> Path:
        """An empty folder aside, for about `num_bytes`; one that somebody left half-written is removed."""
        aside = self.root / f".update_{self.last + 1:06d}.partial"
        try:
            for old in self.root.glob(".update_*"):
                shutil.rmtree(old)
            aside.mkdir(parents=True)
            free = shutil.disk_usage(aside).free
        except OSError as error:
            raise self.refused(error) from error
        if free < num_bytes:
            raise RunFailed(
                f"{self.root} (rollout.engine.weights_dir) has {free:,} bytes left, the weights need {num_bytes:,}: "
                "make room, or choose a folder on a larger disk that the engines see too"
            )
        return aside

    def publish(self, aside: Path) -> Path:
        """Give the folder its name and number; returns where it is now."""
        self.last += 1
        folder = self.root / f"update_{self.last:06d}"
        try:
            os.rename(aside, folder)
        except OSError as error:
            raise self.refused(error) from error
        return folder

    def keep_only(self, needed: Collection[Path]) -> None:
        """Remove the other folders."""
        try:
            for folder in published(self.root):
                if folder not in needed:
                    remove_tree(folder)
        except OSError as error:
            raise self.refused(error) from error

    def add_companions(self, aside: Path) -> None:
        """config.json and the tokenizer's files, so that anything that reads Hugging Face folders reads this one."""
        try:
            shutil.copyfile(self._model / "config.json", aside / "config.json")
            copy_companions(aside, self._model, self._tokenizer)
        except OSError as error:
            raise self.refused(error) from error

    def refused(self, error: OSError) -> RunFailed:
        return RunFailed(f"the weights could not be written to {self.root} (rollout.engine.weights_dir): {error}")


class FullWriter:
    """All tensors of one publication, one shard a bucket. What goes wrong in `add` is told by `finish`.

    The trainer's other ranks are in the middle of sending: they must be heard to the end before anything is raised.
    """

    def __init__(self, folders: WeightFolders, buckets: Sequence[Bucket]) -> None:
        self._folders, self._buckets = folders, buckets
        self.aside = folders.begin(sum(bucket.num_bytes for bucket in buckets))
        self._shards = ShardWriter(self.aside, buckets)
        self._failure: OSError | None = None

    def add(self, bucket: Bucket, flat: Tensor) -> None:
        """`flat`: uint8 [num_bytes] on the host."""
        if self._failure is not None:
            return
        try:
            for name, tensor in bucket.views(flat):
                self._shards.add(name, tensor)
        except OSError as error:
            self.cancel()
            self._failure = error

    def finish(self, **files: dict[str, Any]) -> Path:
        """The folder under its name, with `<key>.json` beside the weights for each of `files`."""
        if self._failure is not None:
            raise self._folders.refused(self._failure)
        try:
            self._shards.finish()
            check_sizes(self.aside, self._buckets)
            for name, content in files.items():
                write_json(self.aside / f"{name}.json", content)
        except OSError as error:
            raise self._folders.refused(error) from error
        self._folders.add_companions(self.aside)
        return self._folders.publish(self.aside)

    def cancel(self) -> None:
        """Leave nothing of it."""
        self._shards.close()
        shutil.rmtree(self.aside, ignore_errors=True)


def published(root: Path) -> list[Path]:
    """The folders that have a name, oldest first."""
    folders = root.iterdir() if root.is_dir() else ()
    return sorted((path for path in folders if _NAME.fullmatch(path.name)), key=number_of)


def number_of(folder: Path) -> int:
    found = _NAME.fullmatch(folder.name)
    if found is None:
        raise ValueError(f"{folder}: expected a folder named update_<number>")
    return int(found[1])


def check_sizes(folder: Path, shards: Iterable[Bucket]) -> None:
    """Raises RunFailed unless each shard has the size that its tensors make: an engine dies of a file that ends early."""
    shards = list(shards)
    writer = ShardWriter(folder, shards)
    for shard in shards:
        path = folder / writer.file_name(shard.index)
        expected = len(header(shard)) + shard.num_bytes
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            raise RunFailed(f"{path} is {'missing' if size is None else f'{size:,} bytes long'}, expected {expected:,} bytes")
