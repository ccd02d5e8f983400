"""Frames between rank 0 and the rollout service: arrays as they were, and nothing else taken."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from rlcore.launch.service import frames


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.settimeout(20)
    with ours, theirs:
        yield ours, theirs


def sent(pair: tuple[socket.socket, socket.socket], message: object) -> object:
    """Send a message through the pair; what arrives."""
    ours, theirs = pair
    thread = threading.Thread(target=frames.send, args=(ours, frames.encode(message)))
    thread.start()
    found = frames.receive(theirs)
    thread.join(20)
    return found


def test_arrays_of_any_size_arrive_aligned_and_writable(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    arrays = [np.arange(n, dtype=np.uint8) for n in (0, 1, 3, 17)]
    arrays += [np.arange(100_000, dtype=np.float64), np.zeros((3, 5), np.float32)[:, ::2]]
    found = sent(pair, (7, {"of": arrays}))
    assert isinstance(found, tuple)
    number, body = found
    assert number == 7
    for before, after in zip(arrays, body["of"], strict=True):
        assert np.array_equal(before, after)
        assert after.dtype == before.dtype
        assert after.flags.aligned
        assert after.flags.writeable


def test_several_frames_follow_each_other(pair: tuple[socket.socket, socket.socket]) -> None:
    for number in range(3):
        assert sent(pair, number) == number


def test_a_large_array_is_not_copied_into_the_pickle() -> None:
    array = np.zeros(1 << 20, np.uint8)
    parts = frames.encode(array)
    assert len(parts[1]) < 1000
    assert any(isinstance(part, memoryview) and part.nbytes == array.nbytes for part in parts)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"print from somebody else",
        frames._HEADER.pack(frames.MARK, 0),
        frames._HEADER.pack(frames.MARK, 1 << 30),
        frames._HEADER.pack(frames.MARK, 1) + struct.pack("!Q", 1 << 60),
        frames._HEADER.pack(frames.MARK, 1) + struct.pack("!Q", 3) + b"???",
        frames._HEADER.pack(frames.MARK, 1)
        + struct.pack("!Q", 10)
        + pickle.dumps([*range(20)])[:10],
    ],
)
def test_what_is_no_frame_is_refused(
    pair: tuple[socket.socket, socket.socket], nonsense: bytes
) -> None:
    ours, theirs = pair
    ours.sendall(nonsense)
    with pytest.raises(frames.BadFrame):
        frames.receive(theirs)


def test_a_frame_that_is_cut_off_is_an_end(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(b"".join(frames.encode([1, 2, 3]))[:-1])
    ours.close()
    with pytest.raises(EOFError):
        frames.receive(theirs)
