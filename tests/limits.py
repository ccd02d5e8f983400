"""Limits of the system, set for a few lines of a test."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


def forbid_large_files(num_bytes: int) -> None:
    """Refuse to write larger files (EFBIG) until this process ends."""
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (num_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


@contextmanager
def no_large_files(num_bytes: int) -> Iterator[None]:
    """Refuse larger files while open, pytest's own output too: keep it short."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    forbid_large_files(num_bytes)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
