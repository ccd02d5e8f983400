"""Messages over a socket between rank 0 and the rollout service: pickles, with arrays next to them.

A frame is a mark, the number of its parts, their lengths, and the parts: the pickle and each large
array (protocol 5), which is not copied into the pickle, nor out of the memory that it is read into.

A pickle can run any code, so use this only for a socket that a child inherited from its parent.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlcore.config import Config

MARK = b"rlsv"
# A smaller array stays in the pickle, so that a step of thousands takes few system calls.
LARGE_BYTES = 1 << 16
MAX_PARTS = 1 << 24
MAX_BYTES = 1 << 38  # of a frame
_HEADER = struct.Struct("!4sI")
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


class BadFrame(ConnectionError):
    """The bytes received are not a frame: something else has written into the socket."""


def encode(message: Any) -> list[bytes | memoryview]:
    """Return the parts of a frame. Raises the errors of `pickle`."""
    arrays: list[memoryview] = []

    def stays_inside(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes >= LARGE_BYTES:
            arrays.append(view)
        return view.nbytes < LARGE_BYTES

    body = pickle.dumps(message, protocol=5, buffer_callback=stays_inside)
    lengths = struct.pack(f"!{1 + len(arrays)}Q", len(body), *(one.nbytes for one in arrays))
    return [_HEADER.pack(MARK, 1 + len(arrays)) + lengths, body, *arrays]


def send(connection: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Send a frame; one thread at a time. Raises OSError if the other side is gone."""
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> Any:
    """Wait for a frame and return its message.

    Raises:
        EOFError: the other side is gone.
        BadFrame: the bytes received are not a frame, or name what this process cannot import.
    """
    mark, count = _HEADER.unpack(_read(connection, _HEADER.size))
    if mark != MARK:
        raise BadFrame(f"a frame begins with {bytes(mark)!r}, expected {MARK!r}")
    if not 1 <= count <= MAX_PARTS:
        raise BadFrame(f"a frame has {count} parts, expected 1 to {MAX_PARTS}")
    lengths = struct.unpack(f"!{count}Q", _read(connection, 8 * count))
    if sum(lengths) > MAX_BYTES:
        raise BadFrame(f"a frame has {sum(lengths)} bytes, expected at most {MAX_BYTES}")
    body, *arrays = [_read(connection, length) for length in lengths]
    try:
        return pickle.loads(body, buffers=arrays)
    except Exception as error:
        raise BadFrame(f"a frame cannot be read: {type(error).__name__}: {error}") from error


def _read(connection: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    left = memoryview(data)
    while left:
        count = connection.recv_into(left)
        if count == 0:
            raise EOFError("the other side is gone")
        left = left[count:]
    return data
