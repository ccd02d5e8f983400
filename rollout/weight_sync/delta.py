"""The delta transport writes only changed weights to the shared folder.

Each machine that runs engines has a follower (delta_follower.py) with a whole copy of the weights.
The trainer writes a whole publication first, then changes. It writes a whole one again
when the changes since the last whole publication are larger than that. Managed engines run on the
trainer's machine and read the folder of its follower. Engines given by URL need a follower on their
machine (`rlcore engine`), which reports its progress in the shared folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcore.weights import Bucket, TensorSpec, fingerprint
from rollout.asyncio_utils import within
from rollout.weight_sync.base import Engine, Failures, Transport, ask
from rollout.weight_sync.delta_codec import encode
from rollout.weight_sync.delta_follower import (
    CHANGES,
    POLL_S,
    Follower,
    FollowerReport,
    Manifest,
    read_reports,
)
from rollout.weight_sync.disk import FolderSender, WeightFolders, keep_only, number_of

THREADS = 8  # hashing, comparing and packing release the interpreter's lock


@dataclass
class Snapshot:
    """A copy of all weights in host memory, to which the next changes refer."""

    buckets: tuple[Bucket, ...]
    flats: list[Tensor]  # uint8 [num_bytes] each
    number: int = 0  # of their publication


class DeltaSender(FolderSender):
    """Rank 0 writes changes, unless a whole publication is due."""

    def __init__(self, folders: WeightFolders) -> None:
        super().__init__(folders)
        # The weights of the last publication; None if the next one must be whole.
        self._last: Snapshot | None = None
        # Bytes of changes since the last whole publication.
        self._since_whole = 0
        # The current publication. A last snapshot is updated while its changes are written.
        self._snapshot = Snapshot((), [])
        self._manifest = Manifest(base=None, num_bytes=0, fingerprints={})

    def _begin(self, buckets: Sequence[Bucket]) -> None:
        last = self._last
        self._last = None
        whole = sum(bucket.num_bytes for bucket in buckets)
        if last is None or last.buckets != tuple(buckets) or self._since_whole > whole:
            super()._begin(buckets)
            self._snapshot = Snapshot(tuple(buckets), [])
            self._manifest = Manifest(base=None, num_bytes=whole, fingerprints={})
        else:
            self._aside = self._folders.begin(0)
            self._snapshot = last
            self._manifest = Manifest(base=last.number, num_bytes=0, fingerprints={})

    def _add(self, bucket: Bucket, flat: Tensor) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            names, views = zip(*bucket.views(flat))
            self._manifest.fingerprints |= zip(names, pool.map(fingerprint, views))
            if self._shards is not None:
                super()._add(bucket, flat)
                self._snapshot.flats.append(flat.clone())
            else:
                before = self._snapshot.flats[bucket.index]
                self._write_changes(bucket, before, flat, pool)
                before.copy_(flat)

    def _write_changes(
        self, bucket: Bucket, before: Tensor, flat: Tensor, pool: ThreadPoolExecutor
    ) -> None:
        def difference(spec: TensorSpec, end: int) -> bytes:
            here = slice(end - spec.num_bytes, end)
            return encode(before[here].numpy(), flat[here].numpy(), spec.torch_dtype.itemsize)

        assert self._aside is not None
        ends = accumulate(spec.num_bytes for spec in bucket.tensors)
        deltas = pool.map(difference, bucket.tensors, ends)
        with (self._aside / CHANGES).open("ab") as file:
            for spec, delta in zip(bucket.tensors, deltas):
                if delta:
                    file.write(delta)
                    self._manifest.changes[spec.name] = (self._manifest.num_bytes, len(delta))
                    self._manifest.num_bytes += len(delta)

    def finish(self) -> dict[str, Any]:
        """Publish the folder. Returns its path, and whether it holds whole weights."""
        manifest = self._manifest
        if self._aside is not None:
            with self._folders.refusals():
                manifest.write(self._aside)
        folder = self._publish()
        self._last = self._snapshot
        self._last.number = number_of(folder)
        is_whole = manifest.base is None
        self._since_whole = 0 if is_whole else self._since_whole + manifest.num_bytes
        return {"folder": str(folder), "is_whole": is_whole}


class DeltaTransport(Transport):
    """A `Transport` by files of changes, with a checksum of every changed tensor.

    An engine reads the folder of a follower on its machine: the transport's own follower if the
    engine is `managed`, otherwise the follower that names its `url`.

    Args:
        root: the shared folder.
    """

    name = "delta"

    def __init__(self, root: Path, *, timeout_s: float) -> None:
        super().__init__(timeout_s=timeout_s)
        self._root = root.absolute()
        self._follower: Follower | None = None

    async def complete(self, result: Mapping[str, Any]) -> Failures:
        """Have every engine load its follower's folder."""
        folder = Path(result["folder"])
        number = number_of(folder)
        if any(engine.managed for engine in self._engines):
            self._follower = self._follower or Follower(self._root)
            local = await asyncio.to_thread(self._follower.follow, number)

        async def load(engine: Engine) -> None:
            await engine.load_folder(
                local if engine.managed else await self._followed(engine, number)
            )

        answers = await ask(self._engines, "load_folder", load, 2 * self._timeout_s)
        if result["is_whole"]:
            await asyncio.to_thread(keep_only, self._root, {folder})
        return answers.failed

    async def close(self) -> None:
        """Remove the folder of the transport's own follower."""
        await super().close()
        if self._follower is not None:
            await asyncio.to_thread(self._follower.close)
            self._follower = None

    async def _followed(self, engine: Engine, number: int) -> Path:
        """Wait for the follower on an engine's machine. Returns its folder."""
        mine: list[FollowerReport] = []

        async def wait() -> Path:
            while True:
                reports = await asyncio.to_thread(read_reports, self._root)
                mine[:] = [report for report in reports if engine.url in report.urls]
                for report in mine:
                    if report.number == number:
                        return Path(report.folder)
                await asyncio.sleep(POLL_S)

        def late() -> str:
            limit = f"within {self._timeout_s:g} s (rollout.engine.update_timeout_s)"
            if not mine:
                return (
                    f"engine {engine.name}: no follower of {self._root} named"
                    f" {engine.url} {limit}: start it with `rlcore engine` and the same"
                    " rollout.engine.weights_dir, or set rollout.engine.transport to disk"
                )
            return (
                f"engine {engine.name}: its follower on {mine[0].host} is at {mine[0].number},"
                f" expected {number} {limit}" + (f": {mine[0].error}" if mine[0].error else "")
            )

        return await within(self._timeout_s, wait(), late)
