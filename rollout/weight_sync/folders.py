"""What the transports over a shared folder have in common: one writer a publication, which takes bucket after bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from rlcore.errors import RunFailed
from rlcore.weights import Bucket
from rollout.weight_sync.base import Failures
from rollout.weight_sync.weight_folders import WeightFolders


class FolderReader(Protocol):
    """An engine that loads its weights from a Hugging Face folder."""

    name: str

    async def load_folder(self, folder: Path) -> None:
        """All weights of `folder` are in the model when this returns; the version is set by nobody yet."""
        ...


class FolderWriter(Protocol):
    def add(self, bucket: Bucket, flat: Tensor) -> None: ...

    def cancel(self) -> None: ...


W = TypeVar("W", bound=FolderWriter)


class FolderTransport(Generic[W]):
    """Everything that blocks on the disk runs in a thread; a writer that was not finished leaves nothing."""

    name: str

    def __init__(self, folders: WeightFolders, *, timeout_s: float) -> None:
        self._folders, self._timeout_s = folders, timeout_s
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
        await FolderTransport.close(self)       # of a publication that was given up
        self._writer = await asyncio.to_thread(make)

    def _take_writer(self) -> W:
        if self._writer is None:
            raise self._outside()
        writer, self._writer = self._writer, None
        return writer

    def _outside(self) -> RunFailed:
        return RunFailed(f"weights for transport {self.name} came outside a publication; call open first")
