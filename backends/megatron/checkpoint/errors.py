"""Errors of torch, Megatron and the disk as one line that names the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint import CheckpointException

from rlcore.errors import FailedElsewhere, ModelError, RunFailed


@contextmanager
def read_errors(folder: Path) -> Iterator[None]:
    """Turn errors of reading into ModelError."""
    try:
        yield
    except (
        CheckpointingException,
        CheckpointException,
        UnpicklingError,
        EOFError,
        OSError,
        RuntimeError,
    ) as error:
        raise ModelError(f"checkpoint {folder}: cannot be loaded: {_first_cause(error)}") from error


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Turn errors of writing into RunFailed, or FailedElsewhere if another rank has the reason."""
    try:
        yield
    except (CheckpointException, OSError, RuntimeError) as error:
        kind = FailedElsewhere if _is_bystander(error) else RunFailed
        raise kind(f"writing {folder}: {_first_cause(error)}") from error


def _is_bystander(error: BaseException) -> bool:
    """Whether torch only says that some rank failed: rank 0 alone receives the reason."""
    return isinstance(error, CheckpointException) and not error.failures


def _first_cause(error: BaseException) -> str:
    """The reason in one line.

    torch's CheckpointException carries a traceback of every rank, its unpickler a page of advice.
    """
    where = ""
    if _is_bystander(error):
        return "another rank failed; the log of rank 0 has the reason"
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        error = cause
        where = f" (rank {rank})"
    if isinstance(error, (UnpicklingError, EOFError)):
        return f"a file holds other bytes than were written{where}"
    return f"{(str(error) or type(error).__name__).splitlines()[0]}{where}"
