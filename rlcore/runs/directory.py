"""A run's directory: its files, and the lock that one process holds.

runs/<name>/config.yaml                        resolved, with the origin of each value
            metrics.jsonl                      one object a step
            rollouts/step_000001.jsonl.zst     every sample
            versions.jsonl                     every publication of weights
            ledger.jsonl                       every transition of every draw
            checkpoints/step_000010/           see checkpoints.py
            logs/                              one file a process
            result.json                        how the run ended; absent while it goes on
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlcore.config.yaml_settings import render_config
from rlcore.errors import DeadlineExceeded, UserError
from rlcore.runs.files import remove_tree, write_atomic

Status = Literal["completed", "early_stopped", "failed", "interrupted"]

LOCK = ".lock"
LOCK_POLL_S = 0.5
# A folder that holds only these was made by a launcher before the run began.
_NOT_A_RUN = frozenset({LOCK, "logs"})
_MARKS_OF_A_RUN = frozenset({"config.yaml", "metrics.jsonl", "result.json", "checkpoints"})
_ROLLOUT = re.compile(r"step_(\d+)\.jsonl\.zst")


@dataclass
class RunDirectory:
    """The files of a run. Rank 0 makes the folder by `create`; others use `RunDirectory(path)`."""

    path: Path
    resumed: bool = False  # whether `create` found an earlier part of the run
    has_ended: bool = False  # whether this process has written the result
    _lock: int | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.versions_path = self.path / "versions.jsonl"
        self.ledger_path = self.path / "ledger.jsonl"
        self.result_path = self.path / "result.json"
        self.logs = self.path / "logs"
        self.rollouts = self.path / "rollouts"
        self.checkpoints = self.path / "checkpoints"

    @classmethod
    def create(
        cls, root: Path | str, name: str, *, resume: bool = False, overwrite: bool = False
    ) -> RunDirectory:
        """Make or enter `<root>/<name>/` and lock it until `close` or the end of this process.

        Args:
            resume: enter an existing run. A new name is accepted too, so that one command serves a
                first start and every restart.
            overwrite: delete what is there.

        Raises:
            UserError: the name exists (without either flag) or is no plain name, or another process
                holds the run.
        """
        existing = check_run_name(root, name, resume=resume, overwrite=overwrite)
        path = Path(root) / name
        path.mkdir(parents=True, exist_ok=True)
        lock = _lock(path)
        if existing and overwrite:
            remove_tree(path)
            os.close(lock)
            path.mkdir()
            lock = _lock(path)
        run = cls(path, resumed=existing and resume, _lock=lock)
        for folder in (run.logs, run.rollouts, run.checkpoints):
            folder.mkdir(exist_ok=True)
        return run

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.path.name

    def rollouts_path(self, step: int) -> Path:
        """Return the file of a step's samples."""
        return self.rollouts / f"step_{step:06d}.jsonl.zst"

    def recorded_steps(self) -> list[int]:
        """Return the steps whose samples were recorded, in order."""
        if not self.rollouts.is_dir():
            return []
        found = (_ROLLOUT.fullmatch(path.name) for path in self.rollouts.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def write_config(
        self, values: Mapping[str, Any], origins: Mapping[str, object] | None = None
    ) -> None:
        """Write the resolved configuration.

        Args:
            origins: where each value came from, by dotted key.
        """
        write_atomic(self.config_path, render_config(values, origins or {}).encode())

    def write_result(self, status: Status, steps: int, reason: str = "", **details: Any) -> None:
        """Write how the run ended. `details` are JSON-able: `objective_kl`, `target_kl`, ..."""
        result = {"status": status, "steps": steps, "reason": reason, **details}
        write_atomic(self.result_path, json.dumps(result, indent=2).encode() + b"\n")
        self.has_ended = True

    def read_result(self, *, since: float = 0.0) -> dict[str, Any] | None:
        """Read what `write_result` wrote, `since` seconds from the epoch or later.

        Returns None while the run goes on, or if it was killed.
        """
        if not (self.result_path.exists() and self.result_path.stat().st_mtime >= since):
            return None
        result: dict[str, Any] = json.loads(self.result_path.read_bytes())
        return result

    def rewind(self, step: int) -> None:
        """Delete the samples of later steps and the result: the run goes on from `step`.

        Metrics and checkpoints have their own `rewind`.
        """
        self.result_path.unlink(missing_ok=True)
        for path in self.rollouts.iterdir():
            match = _ROLLOUT.fullmatch(path.name)
            if path.suffix == ".tmp" or (match and int(match[1]) > step):
                path.unlink()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def check_run_name(root: Path | str, name: str, *, resume: bool, overwrite: bool) -> bool:
    """Whether a run of that name exists. It changes nothing.

    Raises:
        UserError: as in `RunDirectory.create`.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite contradict each other: keep the run or delete it")
    if not name or name.startswith(".") or os.sep in name:
        raise UserError(
            f"run.name must be a plain folder name that does not start with a dot, got {name!r}"
        )
    path = Path(root) / name
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; a run needs a folder there: choose another run.name")
    existing = path.is_dir() and any(entry.name not in _NOT_A_RUN for entry in path.iterdir())
    if existing and not (resume or overwrite):
        raise UserError(
            f"run {name!r} exists ({path}): continue it with --resume, replace it with --overwrite,"
            " or choose another run.name"
        )
    if existing and overwrite:
        _check_is_run(path)
    return existing


def _check_is_run(path: Path) -> None:
    if not any((path / name).exists() for name in _MARKS_OF_A_RUN):
        marks = ", ".join(sorted(_MARKS_OF_A_RUN))
        raise UserError(
            f"--overwrite: {path} does not look like a run (it has none of {marks}); delete it"
            " yourself"
        )


def _lock(path: Path) -> int:
    """Take the lock, which the operating system releases however this process ends.

    It is a record lock, not flock: forked children do not inherit it, so a worker that outlives its
    run blocks nobody.
    """
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    if (holder := _taken_by_another(descriptor)) is not None:
        os.close(descriptor)
        raise UserError(
            f"{path} is in use by {holder}: stop that first, or choose another run.name"
        )
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    return descriptor


def wait_until_free(
    path: Path, *, limit_s: float, key: str, tick: Callable[[], None] = lambda: None
) -> None:
    """Wait until no process holds the run in `path`; not for a process that holds it itself.

    A network file system keeps the lock of a lost machine until its lease has run out.

    Args:
        key: the configuration's key that sets the limit.
        tick: called while we wait.

    Raises:
        DeadlineExceeded: it is still held after `limit_s`; names the holder.
    """
    deadline = time.monotonic() + limit_s
    while (holder := _holder(path)) is not None:
        tick()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{path} was to be taken over and is still in use by {holder} after {limit_s:g} s"
                f" ({key}): stop that, or where its machine is lost wait until the file system"
                " gives its lock back; then continue with --resume"
            )
        time.sleep(LOCK_POLL_S)


def _holder(path: Path) -> str | None:
    """Return the holder of the run, None if it is free."""
    descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        return _taken_by_another(descriptor)
    finally:
        os.close(descriptor)  # with the lock


def _taken_by_another(descriptor: int) -> str | None:
    """Take the lock. Returns the holder if another process has it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return os.read(descriptor, 200).decode(errors="replace").strip()
    except OSError:
        return None  # a file system without locks: go on without
    return None
