"""Publications as Hugging Face folders that trainer and engines share.

`WeightFolders` numbers the folders, rank 0's `FolderSender` fills one, and `DiskTransport` has the
engines load it. The delta transport (delta.py) writes smaller publications.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcore.errors import RunFailed
from rlcore.hf_folder import ShardWriter, copy_companions
from rlcore.interfaces import BucketSender
from rlcore.runs.files import remove_tree
from rlcore.weights import Bucket
from rollout.weight_sync.base import Failures, Transport, ask

logger = logging.getLogger(__name__)

_LOCK = ".lock"
_NAME = re.compile(r"update_\d{6,}")


class WeightFolders:
    """The folders `root/update_000001`, `update_000002`, ..., written aside and then renamed.

    Numbers continue where an earlier run stopped. Nothing is forced onto the disk: these files
    serve engines that run now, and after a power failure both sides restart from a checkpoint. The
    methods raise RunFailed, naming folder and bytes, if the system refuses.

    Only one trainer publishes to a folder: it holds a lock there from its first publication on.

    Args:
        model: the Hugging Face folder whose config.json is added.
        tokenizer: the folder whose tokenizer files are added; `model` if None.
    """

    def __init__(self, root: Path, *, model: Path, tokenizer: Path | None = None) -> None:
        self.root = root.absolute()
        self._model = model
        self._tokenizer = tokenizer or model
        self.last = max((number_of(path) for path in published(self.root)), default=0)
        self._lock: int | None = None

    def begin(self, num_bytes: int) -> Path:
        """Make an empty unpublished folder for about `num_bytes`, and remove unfinished ones."""
        aside = self.root / f".update_{self.last + 1:06d}.partial"
        with self.refusals():
            self.root.mkdir(parents=True, exist_ok=True)
            self._take()
            for old in self.root.glob(".update_*"):
                shutil.rmtree(old)
            aside.mkdir(parents=True)
            free = shutil.disk_usage(aside).free
        if free < num_bytes:
            raise RunFailed(
                f"{self.root} (rollout.engine.weights_dir) has {free:,} bytes left, the weights"
                f" need {num_bytes:,}: make room, or choose a folder on a larger disk that the"
                " engines see too"
            )
        return aside

    def close(self) -> None:
        """Let another trainer publish. May be called twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _take(self) -> None:
        if self._lock is not None:
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(self.root / _LOCK, flags, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise RunFailed(
                f"another trainer publishes to {self.root}: give each run a"
                " rollout.engine.weights_dir of its own"
            ) from None
        except OSError as error:
            logger.warning(
                "the file system of %s has no locks (%s): nothing keeps a second trainer from"
                " publishing there",
                self.root,
                error,
            )

    def publish(self, aside: Path) -> Path:
        """Give the folder its number, and return its new path. Raises OSError."""
        self.last += 1
        return aside.rename(self.root / f"update_{self.last:06d}")

    def add_companions(self, aside: Path) -> None:
        """Add config.json and the tokenizer's files, to make a Hugging Face folder."""
        shutil.copyfile(self._model / "config.json", aside / "config.json")
        copy_companions(aside, self._model, self._tokenizer)

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """Turn an OSError into a RunFailed that names the folder."""
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"the weights could not be written to {self.root} (rollout.engine.weights_dir):"
                f" {error}"
            ) from error


def published(root: Path) -> list[Path]:
    """The published folders, oldest first."""
    folders = root.iterdir() if root.is_dir() else ()
    return sorted((path for path in folders if _NAME.fullmatch(path.name)), key=number_of)


def keep_only(root: Path, needed: Collection[Path]) -> None:
    """Remove all other published folders."""
    for folder in published(root):
        if folder in needed:
            continue
        try:
            remove_tree(folder)
        except OSError as error:
            # An engine may be reading the folder: on NFS its files then stay.
            logger.warning("the old weights in %s could not be removed: %s", folder, error)


def number_of(folder: Path) -> int:
    """The number in the folder's name."""
    return int(folder.name.removeprefix("update_"))


class FolderSender(BucketSender):
    """Rank 0's half: writes each publication to a new folder, and removes an unfinished one.

    A folder has one safetensors file for each bucket.
    """

    def __init__(self, folders: WeightFolders) -> None:
        self._folders = folders
        # the unfinished folder
        self._aside: Path | None = None
        self._shards: ShardWriter | None = None
        # of a write
        self._failure: OSError | None = None

    def open(self, order: Any, buckets: Sequence[Bucket]) -> None:
        """Begin a folder. Raises RunFailed if the disk is full, or another trainer writes here."""
        self._drop()
        self._failure = None
        self._begin(buckets)

    def _begin(self, buckets: Sequence[Bucket]) -> None:
        self._aside = self._folders.begin(sum(bucket.num_bytes for bucket in buckets))
        self._shards = ShardWriter(self._aside, buckets)

    def send(self, bucket: Bucket, flat: Tensor, stopped: Callable[[], Any]) -> None:
        """Write the bucket.

        `finish` raises the error of a failed write, because the trainer's other ranks must first
        complete their gathers.
        """
        if self._aside is None or stopped() is not None:
            return
        try:
            self._add(bucket, flat.cpu())
        except OSError as error:
            self._failure = error
            self._drop()

    def _add(self, bucket: Bucket, flat: Tensor) -> None:
        """Write a bucket. `flat`: uint8 [num_bytes] on the host."""
        assert self._shards is not None
        for name, tensor in bucket.views(flat):
            self._shards.add(name, tensor)

    def finish(self) -> Any:
        """Publish the folder. Returns its path. Raises RunFailed if it could not be written."""
        return str(self._publish())

    def _publish(self) -> Path:
        with self._folders.refusals():
            if self._failure is not None:
                raise self._failure
            assert self._aside is not None
            if self._shards is not None:
                self._shards.finish()
                self._folders.add_companions(self._aside)
            folder = self._folders.publish(self._aside)
        self._aside = self._shards = None
        return folder

    def close(self) -> None:
        """Remove an unfinished publication, and let another trainer publish."""
        self._drop()
        self._folders.close()

    def _drop(self) -> None:
        if self._shards is not None:
            self._shards.close()
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)
        self._aside = self._shards = None


class DiskTransport(Transport):
    """A `Transport` by one folder for each publication, which every engine loads at the end.

    `engine.load_folder(folder)` loads all weights of a Hugging Face folder, and does not set the
    version. The folder must have the same path for the trainer and all engines. A folder is removed
    when each engine that is still served has loaded a newer one.

    Args:
        root: the folder of these folders.
    """

    name = "disk"

    def __init__(self, root: Path, *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._root = root.absolute()
        # engine's name -> folder of its weights
        self._loaded: dict[str, Path] = {}

    async def complete(self, result: str) -> Failures:
        """Have every engine load the folder."""
        folder = Path(result)
        answers = await ask(
            self._engines, "load_folder", lambda e: e.load_folder(folder), self._timeout_s
        )
        if self.has_all_engines:
            names = {engine.name for engine in self._engines}
            self._loaded = {name: one for name, one in self._loaded.items() if name in names}
        for engine in self._engines:
            if engine in answers.failed:
                self._loaded.pop(engine.name, None)
            else:
                self._loaded[engine.name] = folder
        await asyncio.to_thread(keep_only, self._root, {folder, *self._loaded.values()})
        return answers.failed
