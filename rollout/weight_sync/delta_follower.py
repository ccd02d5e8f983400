"""The engines' side of the delta transport: a local folder of whole weights, kept up to date.

Each machine with engines runs one follower, in the trainer's process or in `rlcore engine`. A
follower copies the newest whole publication once, then applies changes in place, and compares the
checksum of each tensor with the trainer's. If anything is missing or damaged, it begins again from
the whole publication. A manifest names the publication that changes apply to:

    update_000004/      a whole publication: safetensors, config, manifest.json
    update_000005/      the changes since 4: changes.bin, manifest.json
    update_000006/      the changes since 5
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import logging
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from rlcore.errors import RunFailed
from rlcore.hf_folder import TensorOffset, find_tensors
from rlcore.runs.files import write_atomic
from rlcore.weights import fingerprint
from rollout.weight_sync.delta_codec import DeltaError, apply
from rollout.weight_sync.disk import number_of, published

POLL_S = 0.1
_IN_USE = ".in_use"  # lock file in a local folder, held by its follower
REPORTS = "followers"  # shared subfolder in which followers report their progress
CHANGES = "changes.bin"
Size = Annotated[int, Field(ge=0, lt=1 << 53)]  # bytes

logger = logging.getLogger(__name__)


class Manifest(BaseModel):
    """The content of a folder."""

    model_config = ConfigDict(strict=True, extra="forbid")

    base: int | None  # the publication that the changes apply to; None for a whole publication
    num_bytes: Size  # of the weights or changes
    fingerprints: dict[str, str]  # checksum of every tensor after the publication (rlcore.weights)
    changes: dict[str, tuple[Size, Size]] = {}  # offset, size by tensor

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder. Raises RunFailed naming the file."""
        path = folder / "manifest.json"
        try:
            manifest = cls.model_validate_json(path.read_bytes())
            if manifest.base is not None and not 0 < manifest.base < number_of(folder):
                raise ValueError(f"base {manifest.base}, expected one before {number_of(folder)}")
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise RunFailed(f"{path} is not a manifest of a publication: {reason}") from error
        return manifest

    def write(self, folder: Path) -> None:
        """Write the manifest of a folder. Raises OSError."""
        (folder / "manifest.json").write_text(self.model_dump_json(indent=2), encoding="utf-8")

    def read_changes(self, folder: Path, name: str) -> bytes:
        """Read the changes of tensor `name`, for `delta_codec.apply`. Raises OSError."""
        offset, size = self.changes[name]
        with (folder / CHANGES).open("rb") as file:
            file.seek(offset)
            return file.read(size)


class Damaged(Exception):
    """A published folder, or the local one, does not match its manifest."""


class Follower:
    """`folder` holds whole weights of publication `number`, once `follow` has returned.

    Args:
        root: the parent of local folders, by default shared memory.
    """

    def __init__(self, shared: Path, root: Path | None = None) -> None:
        self.shared = shared.absolute()
        if root is None:
            root = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(tempfile.gettempdir())
        self._home, self._lock = make_home(self.shared, root)
        self.folder = self._home / "weights"
        self.number: int | None = None
        self._fingerprints: dict[str, str] = {}
        self._places: dict[str, TensorOffset] = {}

    def newest(self) -> int | None:
        """The number of the newest publication."""
        folders = published(self.shared)
        return number_of(folders[-1]) if folders else None

    def follow(self, number: int) -> Path:
        """Bring `folder` to publication `number`, and return it.

        Raises RunFailed if the shared folder lacks the files for that.
        """
        if self.number is not None:
            try:
                self._walk(number)
                return self.folder
            except Damaged as error:
                logger.warning(
                    "%s: %s; starting again from the last whole publication", self.folder, error
                )
        self.number = None
        try:
            self._walk(number)
        except Damaged as error:
            raise RunFailed(
                f"publication {number} in {self.shared} cannot be rebuilt in {self.folder}: {error}"
            ) from error
        return self.folder

    def close(self) -> None:
        """Remove the local folder."""
        shutil.rmtree(self._home, ignore_errors=True)
        os.close(self._lock)

    def _walk(self, number: int) -> None:
        """Apply each change up to `number`, since `self.number` or the last whole publication."""
        steps: list[tuple[Path, Manifest]] = []
        at: int | None = number
        while at is not None and at != self.number:
            folder = self.shared / f"update_{at:06d}"
            try:
                steps.append((folder, Manifest.read(folder)))
            except RunFailed as error:
                raise Damaged(str(error)) from error
            at = steps[-1][1].base
        for folder, manifest in reversed(steps):
            try:
                if manifest.base is None:
                    self._copy(folder, manifest)
                else:
                    self._change(folder, manifest)
            except (OSError, DeltaError, ValueError) as error:
                raise Damaged(f"{folder}: {error}") from error
            self.number = number_of(folder)
            self._fingerprints = manifest.fingerprints

    def _copy(self, folder: Path, manifest: Manifest) -> None:
        self.number = None
        shutil.rmtree(self.folder, ignore_errors=True)
        free = shutil.disk_usage(self._home).free
        if free < manifest.num_bytes:
            raise RunFailed(
                f"{self.folder} has {free:,} bytes left, the weights need {manifest.num_bytes:,}:"
                " make room there"
            )
        shutil.copytree(folder, self.folder)
        self._places = find_tensors(self.folder)
        self._check(manifest, manifest.fingerprints)

    def _change(self, folder: Path, manifest: Manifest) -> None:
        # The folder matches no publication until all changes are applied.
        self.number = None
        for name in manifest.changes:
            place = self._places.get(name)
            if place is None:
                raise Damaged(
                    f"{folder} changes {name}, which the last whole publication does not have"
                )
            changes = manifest.read_changes(folder, name)
            apply(changes, self._map(place), place.spec.torch_dtype.itemsize)
        self._check(manifest, manifest.changes)
        for name, wanted in manifest.fingerprints.items():
            if name not in manifest.changes and self._fingerprints.get(name) != wanted:
                raise Damaged(f"{folder} does not change {name}, but its checksum differs here")

    def _check(self, manifest: Manifest, names: Iterable[str]) -> None:
        if self._places.keys() != manifest.fingerprints.keys():
            differ = sorted(self._places.keys() ^ manifest.fingerprints.keys())
            raise Damaged(
                f"{self.folder} and the manifest name different tensors: {', '.join(differ[:5])}"
            )
        for name in names:
            place = self._places[name]
            raw = torch.from_numpy(self._map(place))
            tensor = raw.view(place.spec.torch_dtype).view(place.spec.shape)
            if fingerprint(tensor) != manifest.fingerprints[name]:
                raise Damaged(f"{name} in {self.folder} does not have the published checksum")

    def _map(self, place: TensorOffset) -> np.memmap[tuple[int], np.dtype[np.uint8]]:
        return np.memmap(place.path, np.uint8, "r+", place.offset, (place.spec.num_bytes,))


class FollowerReport(BaseModel):
    """The progress of a follower, as a file for the trainer in the shared folder."""

    model_config = ConfigDict(strict=True)

    host: str
    urls: list[str]  # of the engines that read its folder
    number: int | None
    folder: str
    error: str | None = None  # why it does not hold the newest publication


async def keep_following(shared: Path, urls: Sequence[str]) -> None:
    """Follow every publication, and report it in the shared folder, until cancelled."""
    follower = Follower(shared)
    # With pid and host alone, two containers could overwrite each other's file.
    report_path = shared / REPORTS / f"{socket.gethostname()}-{uuid.uuid4().hex}.json"
    report_path.parent.mkdir(parents=True, exist_ok=True)
    tried: int | None = None
    try:
        while True:
            newest = await asyncio.to_thread(follower.newest)
            if newest is not None and newest != tried:
                tried = newest
                error = None
                try:
                    await asyncio.to_thread(follower.follow, newest)
                # recovery: the report has the error; the next publication may be whole
                except RunFailed as failure:
                    error = str(failure)
                    logger.warning("%s", failure)
                report = FollowerReport(
                    host=socket.gethostname(),
                    urls=list(urls),
                    number=follower.number,
                    folder=str(follower.folder),
                    error=error,
                )
                content = report.model_dump_json().encode()
                await asyncio.to_thread(write_atomic, report_path, content)
            await asyncio.sleep(POLL_S)
    finally:
        report_path.unlink(missing_ok=True)
        follower.close()


def read_reports(shared: Path) -> list[FollowerReport]:
    """The reports of all followers."""
    reports = []
    for path in sorted((shared / REPORTS).glob("*.json")):
        # recovery: ignore a report that is gone or invalid, since any user of the folder may write
        # one; the transport names an engine that has no follower
        with suppress(OSError, ValueError):
            reports.append(FollowerReport.model_validate_json(path.read_bytes()))
    return reports


def make_home(shared: Path, root: Path) -> tuple[Path, int]:
    """Make a folder in `root` with an unpredictable name, which only its owner may enter.

    Containers may share `root` and have the same pids, so a folder belongs to the holder of its
    lock. Folders that dead followers of `shared` left behind are removed.

    Returns:
        The folder, and the descriptor that holds its lock.
    """
    root.mkdir(parents=True, exist_ok=True)
    stem = f"rlcore-weights-{hashlib.sha256(str(shared).encode()).hexdigest()[:12]}-"
    for left in root.glob(f"{stem}*"):
        _remove_if_free(left)
    while True:
        # `mkdtemp` sets mode 0700.
        home = Path(tempfile.mkdtemp(prefix=stem, dir=root))
        descriptor = os.open(home / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if (home / _IN_USE).exists():
            return home, descriptor
        # Another follower removed the folder before it was locked.
        os.close(descriptor)


def _remove_if_free(home: Path) -> None:
    """Remove a folder of this user whose follower has ended."""
    try:
        descriptor = os.open(home / _IN_USE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        # The folder belongs to another user, or is being made.
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        # Its follower is running.
        return
    else:
        shutil.rmtree(home, ignore_errors=True)
    finally:
        os.close(descriptor)
