"""Messages over a socket between two of our processes: pickles, with arrays next to them.

A frame is a header (a mark, the number of buffers, the length of the pickle), the length of each
buffer, the pickle, and the buffers, each padded to ALIGNMENT. Arrays are buffers (protocol 5): they
are not copied into the pickle, and the reader gets views of the memory that it read into.

A pickle can run any code, so use this only for a socket that a child inherited from its parent.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlcore.config import Config

MARK = b"rlsv"
ALIGNMENT = 16  # bytes, of every array
MAX_BUFFERS = 1 << 24
MAX_BYTES = 1 << 38  # of a frame
SMALL_BYTES = 1 << 16  # largest buffer that is joined with others
_HEADER = struct.Struct("!4sIQ")
_PADDING = bytes(ALIGNMENT)
# In place of a call's number: the message is a line for the terminal of rank 0.
LINE = -1


@dataclass(frozen=True)
class Begin:
    """The first message to the child, with the arguments for opening the service.

    Attributes:
        again: the service replaces a lost one, so some engines may be lost, too.
        path: the import path of rank 0, for plugins.
        folder: the working directory of rank 0.
    """

    config: Config
    greedy_baseline: bool
    again: bool
    path: Sequence[str]
    folder: str


@dataclass(frozen=True)
class OpenedService:
    """The answer to rank 0 when it opens the service."""

    num_prompts: int
    prompt_lengths: NDArray[np.int64]


class BadFrame(ConnectionError):
    """The bytes received are not a frame: something else has written into the socket."""


def encode(message: Any) -> list[bytes | memoryview]:
    """Return the parts of a frame. Raises the errors of `pickle`."""
    found: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=found.append)
    buffers = [one.raw() for one in found]
    lengths = struct.pack(f"!{len(buffers)}Q", *(one.nbytes for one in buffers))
    parts: list[bytes | memoryview] = [
        _HEADER.pack(MARK, len(buffers), len(body)) + lengths,
        body,
    ]
    for one in buffers:
        parts += [one, _PADDING[: -one.nbytes % ALIGNMENT]]
    return parts


def send(connection: socket.socket, parts: list[bytes | memoryview]) -> None:
    """Send a frame; one thread at a time. Raises OSError if the other side is gone."""
    for chunk in _chunks(parts):
        connection.sendall(chunk)


def receive(connection: socket.socket) -> Any:
    """Wait for a frame and return its message.

    Raises:
        EOFError: the other side is gone.
        BadFrame: the bytes received are not a frame.
    """
    mark, count, length = _HEADER.unpack(_read(connection, _HEADER.size))
    if mark != MARK or count > MAX_BUFFERS or length > MAX_BYTES:
        raise BadFrame(f"a frame begins with {mark!r}, {count} buffers, {length} bytes")
    sizes = struct.unpack(f"!{count}Q", _read(connection, 8 * count))
    padded = [size + -size % ALIGNMENT for size in sizes]
    if sum(padded) > MAX_BYTES:
        raise BadFrame(f"a frame has buffers of {sum(padded)} bytes")
    body = _read(connection, length)
    memory = memoryview(_read(connection, sum(padded)))
    starts = [0]
    for size in padded:
        starts.append(starts[-1] + size)
    views = [memory[at : at + size] for at, size in zip(starts, sizes, strict=False)]
    try:
        return pickle.loads(body, buffers=views)
    except Exception as error:
        raise BadFrame(f"a frame cannot be read: {type(error).__name__}: {error}") from error


def _chunks(parts: list[bytes | memoryview]) -> Iterator[bytes | bytearray | memoryview]:
    """Join small parts, so that a step of thousands of arrays takes few system calls."""
    joined = bytearray()
    for part in parts:
        if len(part) >= SMALL_BYTES:
            if joined:
                yield joined
                joined = bytearray()
            yield part
            continue
        joined += part
        if len(joined) >= SMALL_BYTES:
            yield joined
            joined = bytearray()
    if joined:
        yield joined


def _read(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    left = memoryview(data)
    while left:
        count = connection.recv_into(left)
        if count == 0:
            raise EOFError("the other side is gone")
        left = left[count:]
    return data
