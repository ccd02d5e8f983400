"""The files of a publication by changes. A manifest names the publication that it applies to.

update_000004/      a whole publication: safetensors, config, manifest.json
update_000005/      the changes since 4: changes.bin, manifest.json
update_000006/      the changes since 5
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlcore.errors import RunFailed
from rlcore.hf_folder import write_json
from rlcore.weights import Bucket, TensorSpec, fingerprint
from rollout.weight_sync.delta_codec import encode
from rollout.weight_sync.folders import FullWriter, WeightFolders, number_of

CHANGES = "changes.bin"
MAX_SIZE = 1 << 53  # of a number of bytes in a manifest
_THREADS = 8  # hashing, comparing and packing release the interpreter's lock


@dataclass(frozen=True)
class Manifest:
    """The content of a folder."""

    base: int | None  # the publication that the changes apply to; None for a whole publication
    num_bytes: int  # size of the weights or changes
    fingerprints: dict[str, str]  # checksum of every tensor after the publication (rlcore.weights)
    changes: dict[str, tuple[int, int]] = field(default_factory=dict)  # offset, size by tensor

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder. Raises RunFailed naming the file."""
        path = folder / "manifest.json"
        try:
            manifest = cls(**json.loads(path.read_bytes()))
            manifest._check(number_of(folder))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise RunFailed(f"{path} is not a manifest of a publication: {error}") from error
        return manifest

    def _check(self, number: int) -> None:
        """Raise ValueError unless this can be the manifest of publication `number`."""
        if self.base is not None and not (type(self.base) is int and 0 < self.base < number):
            raise ValueError(f"base {str(self.base)[:40]}, expected one before {number}")
        if not _is_size(self.num_bytes):
            raise ValueError(f"num_bytes {str(self.num_bytes)[:40]}, expected a size")
        sums = self.fingerprints
        if not isinstance(sums, dict) or not all(isinstance(one, str) for one in sums.values()):
            raise ValueError("fingerprints, expected a checksum of each tensor")
        if not isinstance(self.changes, dict):
            raise ValueError("changes, expected offset and size of each tensor that changed")
        for name, span in self.changes.items():
            if not isinstance(span, list) or not len(span) == 2 or not all(map(_is_size, span)):
                raise ValueError(f"changes of {name[:80]} at {str(span)[:80]}")


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < MAX_SIZE


@dataclass
class Snapshot:
    """A copy of all weights in host memory, to which the next changes refer."""

    buckets: tuple[Bucket, ...]
    flats: list[Tensor]  # uint8 [num_bytes] each
    number: int = 0


class DeltaWriter:
    """Writes one publication, as changes to the snapshot `since` or whole if that is None.

    `since` is updated to the new weights while they are written.
    """

    def __init__(
        self, folders: WeightFolders, buckets: Sequence[Bucket], since: Snapshot | None
    ) -> None:
        self._folders = folders
        self._base = since.number if since is not None else None
        self._snapshot = since or Snapshot(tuple(buckets), [])
        self._full = FullWriter(folders, buckets) if since is None else None
        self._aside = self._full.aside if self._full is not None else folders.begin(0)
        self._fingerprints: dict[str, str] = {}
        self._changes: dict[str, tuple[int, int]] = {}
        self._size = 0

    def add(self, bucket: Bucket, flat: Tensor) -> None:
        """Write a bucket. `flat`, uint8 [num_bytes] on the host, is copied."""
        with ThreadPoolExecutor(_THREADS) as pool:
            names, views = zip(*bucket.views(flat))
            self._fingerprints |= zip(names, pool.map(fingerprint, views))
            if self._full is not None:
                self._full.add(bucket, flat)
                self._snapshot.flats.append(flat.clone())
            else:
                self._write_changes(bucket, flat, pool)

    def _write_changes(self, bucket: Bucket, flat: Tensor, pool: ThreadPoolExecutor) -> None:
        before = self._snapshot.flats[bucket.index]

        def difference(spec: TensorSpec, end: int) -> bytes:
            here = slice(end - spec.num_bytes, end)
            return encode(before[here].numpy(), flat[here].numpy(), spec.torch_dtype.itemsize)

        ends = accumulate(spec.num_bytes for spec in bucket.tensors)
        deltas = pool.map(difference, bucket.tensors, ends)
        with (self._aside / CHANGES).open("ab") as file:
            for spec, delta in zip(bucket.tensors, deltas):
                if delta:
                    file.write(delta)
                    self._changes[spec.name] = (self._size, len(delta))
                    self._size += len(delta)
        before.copy_(flat)

    def finish(self) -> tuple[Path, Snapshot, Manifest]:
        """Publish and return the folder, and return the new snapshot too. Raises RunFailed."""
        if self._full is not None:
            size = sum(bucket.num_bytes for bucket in self._snapshot.buckets)
            manifest = Manifest(None, size, self._fingerprints)
            folder = self._full.finish(manifest=asdict(manifest))
        else:
            manifest = Manifest(self._base, self._size, self._fingerprints, self._changes)
            with self._folders.refusals():
                write_json(self._aside / "manifest.json", asdict(manifest))
            folder = self._folders.publish(self._aside)
        self._snapshot.number = number_of(folder)
        return folder, self._snapshot, manifest

    def cancel(self) -> None:
        """Remove the unfinished folder."""
        if self._full is not None:
            self._full.cancel()
        shutil.rmtree(self._aside, ignore_errors=True)


def changed_bytes(folder: Path, manifest: Manifest, name: str) -> bytes:
    """Read the changes of tensor `name`, for `delta_codec.apply`. Raises OSError."""
    offset, size = manifest.changes[name]
    with (folder / CHANGES).open("rb") as file:
        file.seek(offset)
        return file.read(size)


def tensor_at(raw: np.ndarray[Any, np.dtype[np.uint8]], spec: TensorSpec) -> Tensor:
    """Interpret bytes as a tensor, without a copy."""
    return torch.from_numpy(raw).view(spec.torch_dtype).view(spec.shape)
