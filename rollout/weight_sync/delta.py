"""The delta transport writes only changed weights to the shared folder.

Each machine that runs engines has a follower (follower.py) with a whole copy of the weights. The
trainer writes a whole publication first, then changes (delta_files.py). It writes a whole one again
when the changes since the last whole publication are larger than that. Managed engines run on the
trainer's machine and read the folder of its follower. Engines given by URL need a follower on their
machine (`rlcore engine`), which reports its progress in the shared folder.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcore.weights import Bucket
from rollout.asyncio_utils import within
from rollout.weight_sync.base import Engine, Failures, Transport, ask
from rollout.weight_sync.delta_files import DeltaWriter, Snapshot
from rollout.weight_sync.folders import FolderSender, WeightFolders, keep_only, number_of
from rollout.weight_sync.follower import POLL_S, Follower, FollowerReport, read_reports


class DeltaSender(FolderSender):
    """Rank 0 writes changes, unless a whole publication is due."""

    def __init__(self, folders: WeightFolders) -> None:
        super().__init__(folders)
        self._snapshot: Snapshot | None = None  # the weights that the next changes refer to
        # Bytes of changes since the last whole publication.
        self._since_whole = 0

    def _begin(self, buckets: Sequence[Bucket]) -> DeltaWriter:
        since = self._snapshot
        # `finish` sets the snapshot again, once the weights are published.
        self._snapshot = None
        whole = sum(bucket.num_bytes for bucket in buckets)
        if since is not None and (since.buckets != tuple(buckets) or self._since_whole > whole):
            since = None
        return DeltaWriter(self._folders, buckets, since)

    def finish(self) -> dict[str, Any]:
        """Publish the folder. Returns its path, and whether it holds whole weights."""
        folder, self._snapshot, manifest = self._take_writer().finish()
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
        local = (
            await self._follow(number) if any(engine.managed for engine in self._engines) else None
        )

        async def load(engine: Engine) -> None:
            await engine.load_folder(
                local if engine.managed and local else await self._followed(engine, number)
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

    async def _follow(self, number: int) -> Path:
        """Bring the transport's own follower to publication `number`. Returns its folder."""
        if self._follower is None:
            self._follower = Follower(self._root)
        return await asyncio.to_thread(self._follower.follow, number)

    async def _followed(self, engine: Engine, number: int) -> Path:
        """Wait until the follower on an engine's machine holds publication `number`.

        Returns its folder.
        """
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
