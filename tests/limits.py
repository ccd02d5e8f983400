"""Limits of the system and duties of this process, set for a few lines of a test."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_CHILD_SUBREAPER = 36


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


def adopt_orphans(*, adopt: bool = True) -> None:
    """From now on, what loses its parent below this process becomes its child."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt))


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """While open, `adopt_orphans`."""
    adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(adopt=False)
