"""Checkpoints of a run: each is one folder, which one rename makes valid.

    checkpoints/best.json                    the checkpoint with the best evaluation
                step_000010/state.json       step, version, source snapshot, tracker state, ...
                            manifest.json    size of every file, checksum of all but the largest
                            model/           shards, written by the ranks
                .step_000020.tmp/            being written; the next start deletes it

A kill at any moment leaves the last committed checkpoint loadable. The manifest reveals later
damage (a lost shard, a truncated file); the checkpoint before it is used then.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlcore.errors import FailedElsewhere, RunFailed, UserError
from rlcore.runs.files import files_in, remove_tree, sync, sync_tree, write_atomic
from rlcore.runs.state_codec import decode_state, encode_state

logger = logging.getLogger(__name__)

STATE = "state.json"
MANIFEST = "manifest.json"
MODEL = "model"
BEST = "best.json"
CHECKSUM_LIMIT = 64 << 20  # bytes; larger files are checked by size only, to open quickly
NEARLY_FULL = 16 << 20  # bytes free: torch's error for a full disk does not say that it is full
_STEP = re.compile(r"step_(\d+)")
_BEING_WRITTEN = re.compile(r"\.step_(\d+)\.tmp")
_REPLACED = re.compile(r"\.(step_\d+)\.replaced")
_DISCARDED = re.compile(r"discarded_step_(\d+)")


class DamagedCheckpoint(RunFailed):
    """A checkpoint's files differ from what was committed; the message names the file."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its files agree with the manifest."""

    step: int
    folder: Path
    state: dict[str, Any]

    @property
    def model(self) -> Path:
        """The folder of the shards."""
        return self.folder / MODEL


@dataclass(frozen=True)
class Best:
    """The checkpoint with the best evaluation so far, by `checkpoint.best`."""

    step: int
    metric: str
    mode: str
    value: float

    def __post_init__(self) -> None:
        words = isinstance(self.metric, str) and self.mode in ("max", "min")
        if not words or type(self.step) is not int or not isinstance(self.value, int | float):
            raise ValueError(f"{str(self)[:80]} is not a valid best checkpoint")


class CheckpointStore:
    """The checkpoints of one run. Only rank 0 begins, commits and prunes.

    Constructing a store deletes the remains of killed writes, so on a live run only the run's owner
    may do it; readers use `read_checkpoint`.
    """

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        self._best = read_best(folder)
        # Takes effect with the checkpoint that is being written.
        self._next_best = self._best
        self._sweep()

    # --- writing ----------------------------------------------------------------------------------

    def begin(self, step: int) -> Path:
        """Make an empty temporary folder for `step`, with `model/` in it for the shards."""
        aside = self.aside(step)
        with self._plain_errors(step):
            shutil.rmtree(aside, ignore_errors=True)
            (aside / MODEL).mkdir(parents=True)
        return aside

    def aside(self, step: int) -> Path:
        """Return the temporary folder of `step`."""
        return self.folder / f".{step_name(step)}.tmp"

    def write_state(self, step: int, state: Mapping[str, Any]) -> None:
        """Write the run's state next to the shards; `encode_state` lists the allowed values.

        The commit passes the state's "best" to `point_to_best`.
        """
        self._next_best = best_of(state)
        with self._plain_errors(step):
            write_atomic(self.aside(step) / STATE, encode_state(state))

    def commit(self, step: int) -> Path:
        """Make the checkpoint of `step` the newest, once all ranks have written; then prune.

        Raises:
            RunFailed: the disk is full or failing; the previous checkpoint is intact.
        """
        aside = self.aside(step)
        final = self.path(step)
        with self._plain_errors(step):
            manifest = {"step": step, "files": _manifest(aside)}
            write_atomic(aside / MANIFEST, json.dumps(manifest).encode())
            sync_tree(aside)
            if final.exists():
                os.rename(final, self.folder / f".{final.name}.replaced")
            os.rename(aside, final)
            sync(self.folder)
            self.point_to_best(self._next_best)
        self._prune(step)
        return final

    def point_to_best(self, best: Best | None) -> None:
        """Keep this checkpoint, whatever its age, and stop keeping the previous best."""
        if best is None:
            (self.folder / BEST).unlink(missing_ok=True)
        elif best != read_best(self.folder):
            write_atomic(self.folder / BEST, json.dumps(asdict(best)).encode() + b"\n")
        self._best = best

    def abort(self, step: int) -> None:
        """Delete the checkpoint of `step` that is being written."""
        shutil.rmtree(self.aside(step), ignore_errors=True)

    def path(self, step: int) -> Path:
        """Return the folder of a committed checkpoint."""
        return self.folder / step_name(step)

    def rewind(self, step: int) -> None:
        """Go back to `step`: later checkpoints become `discarded_step_*` until a commit.

        Older ones are pruned as the commit of `step` would have done, had no kill interrupted it.
        """
        for later in committed_steps(self.folder):
            if later > step:
                discarded = self.folder / f"discarded_{step_name(later)}"
                if discarded.exists():
                    remove_tree(discarded)
                os.rename(self.path(later), discarded)
        self._prune(step)

    # --- cleaning up ------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Finish or undo what a kill interrupted."""
        for path in list(self.folder.iterdir()):
            replaced = _REPLACED.fullmatch(path.name)
            if replaced and not (self.folder / replaced[1]).exists():
                # Killed between the two renames of a commit.
                os.rename(path, self.folder / replaced[1])
            elif replaced or path.name.endswith((".tmp", ".trash")):
                shutil.rmtree(path, ignore_errors=True)

    def _prune(self, newest: int) -> None:
        """Delete replaced and discarded checkpoints, and all but the `keep` newest up to `newest`.

        The best checkpoint stays too.
        """
        steps = [step for step in committed_steps(self.folder) if step <= newest]
        best = None if self._best is None else self._best.step
        doomed = [self.path(step) for step in steps[: -self.keep] if step != best]
        for path in self.folder.iterdir():
            match = _DISCARDED.fullmatch(path.name)
            if _REPLACED.fullmatch(path.name) or (match and int(match[1]) <= newest):
                doomed.append(path)
        for path in doomed:
            try:
                remove_tree(path, ignore_errors=True)
            except OSError as error:
                # The new checkpoint is safe; this one only takes space.
                logger.warning("the old checkpoint %s could not be deleted: %s", path, error)

    @contextmanager
    def _plain_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            failure = write_failure(self.folder, step, error)
            # The next start sweeps again.
            with suppress(OSError):
                self._sweep()
            raise failure from error


def write_failure(folder: Path, step: int, error: BaseException) -> RunFailed:
    """Return the error for the checkpoint of `step`, or its shards, that failed with `error`.

    The function only reads the disk, so every rank may call it.

    Args:
        folder: the run's `checkpoints/`.
    """
    intact = "there is no earlier checkpoint"
    if earlier := [s for s in committed_steps(folder) if s != step]:
        intact = f"the checkpoint of step {earlier[-1]} is intact"
    # A full disk is recognised by its text: a rank's error is wrapped, or pickled by torch without
    # its cause.
    full = any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))
    full = full or shutil.disk_usage(folder).free < NEARLY_FULL
    advice = f"free space under {folder} and " if full else ""
    kind = FailedElsewhere if isinstance(error, FailedElsewhere) else RunFailed
    return kind(
        f"the checkpoint of step {step} could not be written: {error}; {intact};"
        f" {advice}continue with --resume"
    )


def committed_steps(folder: Path) -> list[int]:
    """Return the steps that have a folder in a run's `checkpoints/`, whole or damaged, in order."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = (_STEP.fullmatch(path.name) for path in paths)
    return sorted(int(match[1]) for match in found if match)


def unfinished_steps(folder: Path) -> list[int]:
    """Return the steps whose checkpoints are being written, or were when a run was killed."""
    paths = folder.iterdir() if folder.is_dir() else ()
    found = (_BEING_WRITTEN.fullmatch(path.name) for path in paths)
    return [int(match[1]) for match in found if match]


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint in a run's `checkpoints/`, None if there never was one.

    The function only reads the disk. Damaged checkpoints are skipped with a warning.

    Raises:
        UserError: there are checkpoints, and all are damaged.
    """
    damages = []
    for step in reversed(committed_steps(folder)):
        try:
            checkpoint = read_checkpoint(folder / step_name(step))
        except DamagedCheckpoint as error:
            damages.append(str(error))
            continue
        for damage in damages:
            logger.warning("%s; going back to the checkpoint of step %d", damage, step)
        return checkpoint
    if damages:
        raise UserError(
            f"no whole checkpoint is left: {'; '.join(damages)}; restore the files, or start over"
            " with --overwrite"
        )
    return None


def best_of(state: Mapping[str, Any]) -> Best | None:
    """Return the best checkpoint named in a run's state, if any."""
    found = state.get("best")
    return None if found is None else Best(**found)


def read_best(folder: Path) -> Best | None:
    """Return the best checkpoint that a run's `checkpoints/` points to, if any.

    Raises:
        UserError: the file is damaged.
    """
    path = folder / BEST
    try:
        return Best(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; delete it to continue without") from error


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read the checkpoint in `folder` and compare its files with the manifest.

    Raises:
        DamagedCheckpoint: a file is missing or wrong; names it.
    """
    try:
        manifest = _read_json(folder / MANIFEST)
        files = manifest.get("files")
        if not isinstance(files, dict) or STATE not in files:
            raise ValueError(f"{MANIFEST} lists no {STATE}")
        for name, recorded in files.items():
            if wrong := _compare(folder / name, recorded):
                raise ValueError(f"{name} {wrong}")
        state = _read_json(folder / STATE)
        steps = {MANIFEST: manifest.get("step"), STATE: state.get("step", manifest.get("step"))}
        for name, step in steps.items():
            if type(step) is not int or step_name(step) != folder.name:
                raise ValueError(f"{name} is of step {str(step)[:20]}")
    except ValueError as error:
        raise DamagedCheckpoint(f"checkpoint {folder} is damaged: {error}") from error
    return Checkpoint(step=manifest["step"], folder=folder, state=state)


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step_{step:06d}"


def _manifest(folder: Path) -> dict[str, dict[str, int]]:
    """Describe files: relative path -> {"bytes": size, "crc32": checksum, unless it is large}."""
    files = {}
    for path in files_in(folder):
        recorded = {"bytes": path.stat().st_size}
        if recorded["bytes"] <= CHECKSUM_LIMIT:
            recorded["crc32"] = zlib.crc32(path.read_bytes())
        files[path.relative_to(folder).as_posix()] = recorded
    return files


def _compare(path: Path, recorded: Mapping[str, int]) -> str:
    """Describe how a file differs from its record, "" if it does not."""
    if not isinstance(recorded, dict) or type(recorded.get("bytes")) is not int:
        return f"is described by {str(recorded)[:80]}"
    try:
        size = path.stat().st_size
        if size != recorded["bytes"]:
            return f"has {size} bytes, {recorded['bytes']} were written"
        if "crc32" in recorded and zlib.crc32(path.read_bytes()) != recorded["crc32"]:
            return "has the right size but other content than was written"
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        # ValueError: a name that no file can have.
        return f"cannot be read: {error}"
    return ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return decode_state(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name} cannot be read: {error}") from error
