"""Weights as safetensors folders that trainer and engines share: for engines without a process group to the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from rlcore.weights import Bucket
from rollout.weight_sync.base import Failures, ask
from rollout.weight_sync.folders import FolderReader, FolderTransport
from rollout.weight_sync.weight_folders import FullWriter, WeightFolders


class DiskTransport(FolderTransport[FullWriter]):
    """`rollout.weight_sync.base.Transport`: one folder a publication, which every engine loads at the end of it.

    The folder must have the same path for the trainer and all engines. Older ones are removed when each engine that is
    still served has loaded a newer one.
    """

    name = "disk"

    def __init__(self, folders: WeightFolders, *, timeout_s: float) -> None:
        super().__init__(folders, timeout_s=timeout_s)
        self._engines: list[FolderReader] = []
        self._loaded: dict[str, Path] = {}      # engine -> the folder that its weights came from

    async def open(self, engines: Sequence[FolderReader], buckets: Sequence[Bucket]) -> Failures:
        await self._begin(lambda: FullWriter(self._folders, buckets))
        self._engines = list(engines)
        return {}

    async def complete(self) -> Failures:
        folder = await asyncio.to_thread(self._take_writer().finish)
        answers = await ask(self._engines, "load_folder", lambda e: e.load_folder(folder), self._timeout_s)
        for engine in self._engines:
            if engine in answers.failed:
                self._loaded.pop(engine.name, None)
            else:
                self._loaded[engine.name] = folder
        await asyncio.to_thread(self._folders.keep_only, {folder, *self._loaded.values()})
        return answers.failed
