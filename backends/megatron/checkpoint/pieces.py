"""Reads the tensors of a checkpoint a piece at a time.

torch's reader loads each saved tensor whole, next to the memory that it is copied to. Here a large
tensor passes through a small buffer, and its checksum is still verified.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast
from zipfile import ZipFile

import torch
from megatron.core.dist_checkpointing.strategies import torch as strategies
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.utils import _ReaderView
from torch.futures import Future

from backends.megatron.cpu.shim import replaced

PIECE_BYTES = 4 << 20
_RECORD = re.compile(r"/data/\d+$")  # a storage in a file of `torch.save`


class PieceReader(FileSystemReader):
    """A reader that passes large tensors through a small buffer, and reads the metadata once."""

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._metadata: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """See `FileSystemReader`."""
        if self._metadata is None:
            self._metadata = super().read_metadata()
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """See `FileSystemReader`."""
        others = []
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if item.type is LoadItemType.BYTE_IO or info.length <= PIECE_BYTES:
                others.append(item)
                continue
            path = self.fs.concat_path(self.path, info.relative_path)
            with self.fs.create_stream(path, "rb") as stream:
                if not _read(_Window(stream, info.offset, info.length), item, planner):
                    others.append(item)
        return super().read_data(LoadPlan(others, plan.storage_data, plan.planner_data), planner)


class _Window(_ReaderView):
    """A part of a file with the interface of a file."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """See `io.IOBase`. torch's version has the wrong sign for offsets from the end."""
        super().seek(-offset if whence == os.SEEK_END else offset, whence)
        return self.tell()


@contextmanager
def reading_in_pieces() -> Iterator[None]:
    """Inside, Megatron's loader reads with a `PieceReader`."""

    def reader(folder: str | Path, cache_metadata: bool = False) -> Any:
        return PieceReader(folder)

    with replaced(strategies, "_get_filesystem_reader", reader):
        yield


def _read(file: _Window, item: ReadItem, planner: LoadPlanner) -> bool:
    """Read an item's part of a saved tensor. Returns False if the tensor is not stored plainly."""
    with torch.serialization.skip_data():
        stored: Tensor = torch.load(cast(Any, file), map_location="cpu", weights_only=True)
    plain = stored.dim() > 0 and stored.is_contiguous()
    file.seek(0)
    with ZipFile(file) as archive:
        records = [name for name in archive.namelist() if _RECORD.search(name)]
        if not plain or len(records) != 1 or archive.getinfo(records[0]).file_size != stored.nbytes:
            return False
        target = planner.resolve_tensor(item).detach()
        if target.size() != item.lengths:
            raise AssertionError(
                f"{item.storage_index}: {tuple(item.lengths)} requested, but the target is"
                f" {tuple(target.size())}"
            )
        with archive.open(records[0]) as record:
            _copy(record, stored, item, target)
    planner.commit_tensor(item, target)
    return True


def _copy(record: IO[bytes], stored: Tensor, item: ReadItem, target: Tensor) -> None:
    """Copy an item's part of `stored` from `record`, the bytes of `stored`, to `target`.

    The bytes are read to the end, where the checksum is verified.
    """
    # The dimension whose rows are read.
    at = next((dim for dim, size in enumerate(stored.shape) if size > 1), 0)
    first, *offsets = item.storage_offsets[at:]
    wanted, *lengths = item.lengths[at:]
    row_bytes = stored.nbytes // stored.size(at)
    step = max(1, PIECE_BYTES // row_bytes)
    buffer = bytearray(step * row_bytes)
    out = target.view(item.lengths[at:])
    for row in range(0, stored.size(at), step):
        rows = min(step, stored.size(at) - row)
        view = memoryview(buffer)[: rows * row_bytes]
        filled = 0
        while filled < len(view):
            read = record.readinto(view[filled:])  # type: ignore[attr-defined]
            if not read:
                raise EOFError(f"{item.storage_index}: the file ends early")
            filled += read
        start = max(row, first)
        end = min(row + rows, first + wanted)
        if start >= end:
            continue
        piece = torch.frombuffer(view, dtype=stored.dtype).view(rows, *stored.shape[at + 1 :])
        piece = narrow_tensor_by_index(piece, (start - row, *offsets), (end - start, *lengths))
        out[start - first : end - first].copy_(piece)
