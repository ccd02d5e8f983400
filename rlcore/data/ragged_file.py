"""Arrays of different lengths in an unnamed temporary file, mapped into memory.

The system caches frequently read parts in memory, and drops them when memory is short.
"""

from __future__ import annotations

import tempfile
from array import array
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlcore.errors import DataError

T = TypeVar("T", bound=np.generic)


class RaggedWriter(Generic[T]):
    """Writes arrays one after another; `done` returns them."""

    def __init__(self, dtype: type[T]) -> None:
        self._dtype = dtype
        self._file = tempfile.TemporaryFile(prefix="rlcore-prompts-")  # noqa: SIM115 - `done` closes it
        self._offsets = array("q", [0])

    def add(self, values: NDArray[T]) -> None:
        """Append an array. Raises DataError if the disk is full."""
        try:
            self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        except OSError as error:
            raise _no_room(error) from error
        self._offsets.append(self._offsets[-1] + len(values))

    def done(self) -> RaggedArray[T]:
        """Return the written arrays. Raises DataError if the disk is full."""
        try:
            self._file.flush()
        except OSError as error:
            raise _no_room(error) from error
        values: NDArray[T]
        if self._offsets[-1]:
            values = np.memmap(self._file, dtype=self._dtype, mode="r")
        else:
            values = np.zeros(0, dtype=self._dtype)
        # The mapping keeps the file open.
        self._file.close()
        return RaggedArray(values, np.array(self._offsets, dtype=np.int64))


class RaggedArray(Generic[T]):
    """Arrays of different lengths, concatenated in `values`."""

    def __init__(self, values: NDArray[T], offsets: NDArray[np.int64]) -> None:
        self.values = values
        # [N+1]
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[T]:
        part: Any = self.values[self.offsets[index] : self.offsets[index + 1]]
        # A copy in memory, independent of the file.
        return np.array(part)

    def take(self, rows: NDArray[np.int64]) -> RaggedArray[T]:
        """Return some of the arrays, in a separate file. Raises DataError as `done`."""
        writer = RaggedWriter(self.values.dtype.type)
        for row in rows.tolist():
            writer.add(self[row])
        return writer.done()


def _no_room(error: OSError) -> DataError:
    return DataError(
        f"data: the tokenised prompts cannot be written to {tempfile.gettempdir()} ({error}); set"
        " TMPDIR to a folder of a disk with room"
    )
