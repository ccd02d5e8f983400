"""What the transports over a shared folder have in common: one writer a publication, which takes
bucket after bucket.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from rlcore.errors import RunFailed
from rlcore.hf_folder import ShardWriter, copy_companions, header, write_json
from rlcore.runs.files import remove_tree
from rlcore.weights import Bucket
from rollout.weight_sync.base import Failures, ask


class FolderReader(Protocol):
    """An engine that loads its weights from a Hugging Face folder."""

    name: str

    async def load_folder(self, folder: Path) -> None:
        """All weights of `folder` are in the model when this returns; the version is set by nobody
        yet.
        """
        ...


class FolderWriter(Protocol):
    def add(self, bucket: Bucket, flat: Tensor) -> None: ...

    def cancel(self) -> None: ...


W = TypeVar("W", bound=FolderWriter)


class FolderTransport(Generic[W]):
    """Everything that blocks on the disk runs in a thread; a writer that was not finished leaves
    nothing.
    """

    name: str

    def __init__(self, folders: WeightFolders, *, timeout_s: float) -> None:
        self._folders = folders
        self._timeout_s = timeout_s
        self._writer: W | None = None

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        if self._writer is None:
            raise self._outside()
        await asyncio.to_thread(self._writer.add, bucket, flat.cpu())
        return {}

    async def close(self) -> None:
        if self._writer is not None:
            await asyncio.to_thread(self._writer.cancel)
        self._writer = None

    async def _begin(self, make: Callable[[], W]) -> None:
        await FolderTransport.close(self)  # of a publication that was given up
        self._writer = await asyncio.to_thread(make)

    def _take_writer(self) -> W:
        if self._writer is None:
            raise self._outside()
        writer = self._writer
        self._writer = None
        return writer

    def _outside(self) -> RunFailed:
        return RunFailed(
            f"weights for transport {self.name} came outside a publication; call open first"
        )


_NAME = re.compile(r"update_(\d{6,})")


class WeightFolders:
    """`root/update_000001`, `update_000002`, ...: written aside and renamed. Numbers go on where an
    earlier run stopped.

    Nothing is forced onto the disk: these files serve engines that run now, and a machine that
        loses its power restarts both
    sides from a checkpoint.

    Args:
        model: the Hugging Face folder whose config.json goes along. tokenizer: likewise for the
            tokenizer's files.

    Raises RunFailed, naming folder and bytes, where the system refuses.
    """

    def __init__(self, root: Path, *, model: Path, tokenizer: Path | None = None) -> None:
        self.root = root.absolute()
        self._model = model
        self._tokenizer = tokenizer or model
        self.last = max((number_of(path) for path in published(self.root)), default=0)

    def begin(self, num_bytes: int) -> Path:
        """An empty folder aside, for about `num_bytes`; one that somebody left half-written is
        removed.
        """
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
                f"{self.root} (rollout.engine.weights_dir) has {free:,} bytes left, the weights"
                f" need {num_bytes:,}: make room, or choose a folder on a larger disk that the"
                " engines see too"
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
        """config.json and the tokenizer's files, so that anything that reads Hugging Face folders
        reads this one.
        """
        try:
            shutil.copyfile(self._model / "config.json", aside / "config.json")
            copy_companions(aside, self._model, self._tokenizer)
        except OSError as error:
            raise self.refused(error) from error

    def refused(self, error: OSError) -> RunFailed:
        return RunFailed(
            f"the weights could not be written to {self.root} (rollout.engine.weights_dir): {error}"
        )


class FullWriter:
    """All tensors of one publication, one shard a bucket. What goes wrong in `add` is told by
    `finish`.

    The trainer's other ranks are in the middle of sending: they must be heard to the end before
    anything is raised.
    """

    def __init__(self, folders: WeightFolders, buckets: Sequence[Bucket]) -> None:
        self._folders = folders
        self._buckets = buckets
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
    """Raises RunFailed unless each shard has the size that its tensors make: an engine dies of a
    file that ends early.
    """
    shards = list(shards)
    writer = ShardWriter(folder, shards)
    for shard in shards:
        path = folder / writer.file_name(shard.index)
        expected = len(header(shard)) + shard.num_bytes
        size = path.stat().st_size if path.is_file() else None
        if size != expected:
            raise RunFailed(
                f"{path} is {'missing' if size is None else f'{size:,} bytes long'}, expected"
                f" {expected:,} bytes"
            )


class DiskTransport(FolderTransport[FullWriter]):
    """`rollout.weight_sync.base.Transport`: one folder a publication, which every engine loads at
    the end of it.

    The folder must have the same path for the trainer and all engines. Older ones are removed when
    each engine that is still served has loaded a newer one.
    """

    name = "disk"

    def __init__(self, folders: WeightFolders, *, timeout_s: float) -> None:
        super().__init__(folders, timeout_s=timeout_s)
        self._engines: list[FolderReader] = []
        self._loaded: dict[str, Path] = {}  # engine -> the folder that its weights came from

    async def open(self, engines: Sequence[FolderReader], buckets: Sequence[Bucket]) -> Failures:
        await self._begin(lambda: FullWriter(self._folders, buckets))
        self._engines = list(engines)
        return {}

    async def complete(self) -> Failures:
        folder = await asyncio.to_thread(self._take_writer().finish)
        answers = await ask(
            self._engines, "load_folder", lambda e: e.load_folder(folder), self._timeout_s
        )
        for engine in self._engines:
            if engine in answers.failed:
                self._loaded.pop(engine.name, None)
            else:
                self._loaded[engine.name] = folder
        await asyncio.to_thread(self._folders.keep_only, {folder, *self._loaded.values()})
        return answers.failed
