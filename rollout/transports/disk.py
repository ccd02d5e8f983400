"""Weights as safetensors folders that trainer and engines share: for engines without a process group to the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from rlcore.errors import RunFailed
from rlcore.weights import Bucket
from rollout.transports.base import Failures, ask
from rollout.transports.weight_folders import FullWriter, WeightFolders


class FolderReader(Protocol):
    """An engine that loads its weights from a Hugging Face folder."""

    name: str

    async def load_folder(self, folder: Path) -> None:
        """All weights of `folder` are in the model when this returns; the version is set by nobody yet."""
        ...


class DiskTransport:
    """`rollout.transports.base.Transport`: one folder a publication, which every engine loads at the end of it.

    The folder must have the same path for the trainer and all engines. Older ones are removed when each engine that is
    still served has loaded a newer one.
    """

    name = "disk"

    def __init__(self, folders: WeightFolders, *, timeout_s: float) -> None:
        self._folders, self._timeout_s = folders, timeout_s
        self._engines: list[FolderReader] = []
        self._writer: FullWriter | None = None
        self._loaded: dict[str, Path] = {}      # engine -> the folder that its weights came from

    async def open(self, engines: Sequence[FolderReader], buckets: Sequence[Bucket]) -> Failures:
        await self.close()
        self._engines = list(engines)
        self._writer = await asyncio.to_thread(FullWriter, self._folders, buckets)
        return {}

    async def send(self, bucket: Bucket, flat: Tensor) -> Failures:
        await asyncio.to_thread(self._open_writer().add, bucket, flat.cpu())
        return {}

    async def complete(self) -> Failures:
        writer, self._writer = self._open_writer(), None
        folder = await asyncio.to_thread(writer.finish)
        answers = await ask(self._engines, "load_folder", lambda e: e.load_folder(folder), self._timeout_s)
        for engine in self._engines:
            if engine in answers.failed:
                self._loaded.pop(engine.name, None)
            else:
                self._loaded[engine.name] = folder
        await asyncio.to_thread(self._folders.keep_only, {folder, *self._loaded.values()})
        return answers.failed

    async def close(self) -> None:
        if self._writer is not None:
            await asyncio.to_thread(self._writer.cancel)
        self._writer = None

    def _open_writer(self) -> FullWriter:
        if self._writer is None:
            raise RunFailed("weights for the disk came outside a publication; call open first")
        return self._writer
