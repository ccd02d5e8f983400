"""Encodes the difference between two versions of a tensor.

After a small step most weights in bf16 are unchanged, and the others differ in their low bits. So
the code stores the distances between changed elements, and the exclusive or of the old and new
elements. Bytes of equal significance are grouped, so that zstandard finds the zeros. At a learning
rate of 1e-6 this takes about 2 % of the tensor. Applied twice, a difference undoes itself: the
caller must know to which version it is applied, and check the result.
"""

from __future__ import annotations

import struct

import numpy as np
import zstandard
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

BLOCK = 1 << 22  # elements: bounds the memory, and a distance fits into 4 bytes
_FRAME = struct.Struct("<II")  # head of a block: changed elements, bytes that follow
_LEVEL = 1  # of compression; higher levels take longer and save nothing


class DeltaError(ValueError):
    """The bytes do not encode a difference between tensors of this size."""


def encode(old: Bytes, new: Bytes, itemsize: int) -> bytes:
    """Encode the difference of two tensors, uint8 [n] each; b"" if they are equal."""
    if old.shape != new.shape:
        raise ValueError(f"got {old.shape} and {new.shape} bytes, expected the same number")
    before = _elements(old, itemsize)
    after = _elements(new, itemsize)
    frames = [
        _encode_block(before[at : at + BLOCK], after[at : at + BLOCK])
        for at in range(0, len(before), BLOCK)
    ]
    return b"".join(frames) if any(len(frame) > _FRAME.size for frame in frames) else b""


def apply(delta: bytes, tensor: Bytes, itemsize: int) -> None:
    """Change `tensor`, uint8 [n], in place. After a DeltaError its content is undefined."""
    elements = _elements(tensor, itemsize)
    at = 0
    for start in range(0, len(elements) if delta else 0, BLOCK):
        if at + _FRAME.size > len(delta):
            raise DeltaError(
                f"{len(delta)} bytes of changes end before element {start} of {len(elements)}"
            )
        count, size = _FRAME.unpack_from(delta, at)
        at += _FRAME.size
        _apply_block(delta[at : at + size], count, elements[start : start + BLOCK])
        at += size
    if at != len(delta):
        raise DeltaError(f"{len(delta)} bytes of changes, expected {at}")


def _encode_block(before: NDArray[np.integer], after: NDArray[np.integer]) -> bytes:
    where = np.flatnonzero(before != after)
    if not len(where):
        return _FRAME.pack(0, 0)
    distances = np.diff(where, prepend=0).astype("<u4")
    changes = before[where] ^ after[where]
    body = zstandard.ZstdCompressor(level=_LEVEL).compress(_planes(distances) + _planes(changes))
    return _FRAME.pack(len(where), len(body)) + body


def _apply_block(body: bytes, count: int, elements: NDArray[np.integer]) -> None:
    if count == 0:
        return
    expected = count * (4 + elements.itemsize)
    try:
        claimed = zstandard.get_frame_parameters(body).content_size
        # Check the size before the memory is allocated.
        if count > len(elements) or claimed != expected:
            raise DeltaError(
                f"{claimed} bytes of changes for {count} of {len(elements)} elements, expected"
                f" {expected}"
            )
        raw = zstandard.ZstdDecompressor().decompress(body)
    except zstandard.ZstdError as error:
        raise DeltaError(f"the changes cannot be unpacked: {error}") from error
    where = np.cumsum(_from_planes(raw[: 4 * count], "<u4"), dtype=np.int64)
    if where[-1] >= len(elements):
        raise DeltaError(f"a change at element {where[-1]} of {len(elements)}")
    elements[where] ^= _from_planes(raw[4 * count :], elements.dtype.str)


def _elements(tensor: Bytes, itemsize: int) -> NDArray[np.integer]:
    return tensor.view(f"<u{itemsize}")


def _planes(values: NDArray[np.integer]) -> bytes:
    """Reorder bytes: first all lowest ones, then all next ones, ..."""
    return np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T).tobytes()


def _from_planes(raw: bytes, dtype: str) -> NDArray[np.integer]:
    planes = np.frombuffer(raw, np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    values: NDArray[np.integer] = np.ascontiguousarray(planes.T).view(dtype).reshape(-1)
    return values
