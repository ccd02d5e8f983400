"""Limits of the system, set for a few lines of a test."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


def forbid_large_files(num_bytes: int) -> None:
    """From here on the system refuses to write more than this into a file: EFBIG. For a process
    that ends with it.
    """
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


@contextmanager
def no_large_files(num_bytes: int) -> Iterator[None]:
    """Inside, larger files are refused: pytest's own output too, so no longer than it must."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    forbid_large_files(num_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
