"""A run's directory: its files, listed in docs/runs.md, and the lock held by its process."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlcore.config.secrets import mask_text, masked
from rlcore.config.yaml_settings import render_config
from rlcore.errors import UserError
from rlcore.runs.checkpoints import committed_steps, step_name, unfinished_steps
from rlcore.runs.files import remove_tree, write_atomic
from rlcore.runs.lock import LOCK, OWNER, RunLock

logger = logging.getLogger(__name__)

# The result file's inode, time of change (ns) and bytes.
ResultMark = tuple[int, int, int]
Status = Literal["completed", "early_stopped", "failed", "interrupted"]

CONFIG = "config.yaml"
PRUNED = "pruned"  # in rollouts/: the newest step that may be missing there
HEADER = "# Written by rlcore: the resolved configuration of this run. Secrets are masked.\n"
# A launcher makes a folder with only these before the run begins.
_NOT_A_RUN = frozenset({LOCK, OWNER, "logs"})
# A run that ends before it writes anything leaves these empty.
_EMPTY_AT_FIRST = ("rollouts", "checkpoints")
# Files of a run besides the paths of `RunDirectory`.
_MORE_OF_A_RUN = ("hf", "hf_best", "weights", "tensorboard", "wandb", "wandb_run_id")
_MAX_NAME_BYTES = 200  # bytes; file systems take 255, of which `.NAME.trash` needs some
STEP_FILE = re.compile(r"step_(\d{1,12})\.parquet")  # of samples


@dataclass
class RunDirectory:
    """The files of a run. Rank 0 makes the folder by `create`; others use `RunDirectory(path)`."""

    path: Path
    resumed: bool = False  # whether `create` found an earlier part of the run
    has_ended: bool = False  # whether this process has written the result
    _lock: RunLock | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.name = self.path.name
        self.config_path = self.path / CONFIG
        self.metrics_path = self.path / "metrics.jsonl"
        self.environment_path = self.path / "environment.jsonl"
        self.notices_path = self.path / "notices.jsonl"
        self.versions_path = self.path / "versions.jsonl"
        self.ledger_path = self.path / "ledger.jsonl"
        self.result_path = self.path / "result.json"
        self.logs = self.path / "logs"
        self.rollouts = self.path / "rollouts"
        self.timeline = self.path / "timeline"
        self.engines_path = self.logs / "engines.json"
        self.evaluations = self.path / "evaluations"
        self.index = self.path / "index"
        self.merged_index = self.index / "merged"
        self.checkpoints = self.path / "checkpoints"

    @classmethod
    def create(
        cls, root: Path | str, name: str, *, resume: bool = False, overwrite: bool = False
    ) -> RunDirectory:
        """Make or enter `<root>/<name>/` and lock it until `close` or the end of this process.

        Args:
            resume: enter an existing run. A new name is accepted too, so that the same command
                serves the first start and every restart.
            overwrite: delete the existing run. Files that no run writes stay, and are named.

        Raises:
            UserError: the name exists (without either flag), is not a plain name, or, to be
                overwritten, is not a run's; or another process holds the run.
        """
        existing = check_run_name(root, name, resume=resume, overwrite=overwrite)
        path = Path(root) / name
        path.mkdir(parents=True, exist_ok=True)
        lock = RunLock.take(path)
        if existing and overwrite and (kept := _clear(path)):
            logger.warning(
                "--overwrite left files of no rlcore run in %s: %s", path, ", ".join(kept)
            )
        run = cls(path, resumed=existing and resume, _lock=lock)
        for folder in (run.logs, run.rollouts, run.checkpoints):
            folder.mkdir(exist_ok=True)
        return run

    def discard(self) -> None:
        """Delete the run's files, and the folder if it holds nothing else and is not a link."""
        if not _clear(self.path) and not self.path.is_symlink():
            remove_tree(self.path, ignore_errors=True)

    def rollouts_path(self, step: int) -> Path:
        """Return the file of a step's samples."""
        return self.rollouts / f"{step_name(step)}.parquet"

    def evaluations_path(self, step: int) -> Path:
        """Return the file of the samples of the evaluation after a step."""
        return self.evaluations / f"{step_name(step)}.parquet"

    def index_path(self, step: int) -> Path:
        """Return the file of the scalars of a step's samples."""
        return self.index / f"{step_name(step)}.parquet"

    def recorded_steps(self) -> list[int]:
        """Return the steps whose samples were recorded, in order."""
        paths = self.rollouts.iterdir() if self.rollouts.is_dir() else ()
        found = (STEP_FILE.fullmatch(path.name) for path in paths)
        return sorted(int(match[1]) for match in found if match)

    def prune_rollouts(self, step: int, *, keep: int) -> None:
        """Delete the samples of all but the `keep` newest steps up to `step`.

        The samples of the step after each checkpoint stay, since a replay from it trains on them.
        The newest step that may be missing is written down first, for `rlcore ledger`.
        """
        through = step - keep
        saved = [*committed_steps(self.checkpoints), *unfinished_steps(self.checkpoints)]
        spared = {checkpoint + 1 for checkpoint in saved}
        doomed = [old for old in self.recorded_steps() if old <= through and old not in spared]
        if not doomed:
            return
        if through > self.pruned_through():
            write_atomic(self.rollouts / PRUNED, f"{through}\n".encode())
        for old in doomed:
            self.rollouts_path(old).unlink(missing_ok=True)
            self.evaluations_path(old).unlink(missing_ok=True)

    def pruned_through(self) -> int:
        """Return the newest step whose samples `prune_rollouts` may have deleted, 0 for none."""
        try:
            return int((self.rollouts / PRUNED).read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def write_config(
        self, values: Mapping[str, Any], origins: Mapping[str, object] | None = None
    ) -> None:
        """Write the resolved configuration with masked secrets, readable by its owner only.

        Args:
            origins: where each value came from, by dotted key.
        """
        text = HEADER + render_config(masked(values), origins or {})
        write_atomic(self.config_path, text.encode(), mode=0o600)

    def write_result(self, status: Status, steps: int, reason: str = "", **details: Any) -> None:
        """Write how the run ended. `details` are JSON-able: `objective_kl`, `target_kl`, ..."""
        result = {"status": status, "steps": steps, "reason": mask_text(reason), **details}
        write_atomic(self.result_path, json.dumps(result, indent=2).encode() + b"\n")
        self.has_ended = True

    def result_mark(self) -> ResultMark | None:
        """Return a mark of the current result, which `read_result` can ignore."""
        try:
            found = self.result_path.stat()
        except (OSError, ValueError):
            # There is no result, or the name is refused later by `check_run_name`.
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read_result(self, *, but: ResultMark | None = None) -> dict[str, Any] | None:
        """Read what `write_result` wrote.

        Args:
            but: a mark of an earlier result to ignore. Clocks are not compared, since the file
                server's may differ from ours.

        Returns:
            None while the run continues, or if it was killed.
        """
        if self.result_mark() in (None, but):
            return None
        result: dict[str, Any] = json.loads(self.result_path.read_bytes())
        return result

    def rewind(self, step: int) -> None:
        """Delete the samples of later steps and the result: the run continues from `step`.

        Metrics and checkpoints have their own `rewind`.
        """
        self.result_path.unlink(missing_ok=True)
        folders = (self.rollouts, self.evaluations, self.index, self.merged_index)
        for path in (path for folder in folders if folder.is_dir() for path in folder.iterdir()):
            match = STEP_FILE.fullmatch(path.name)
            if path.suffix == ".tmp" or (match and int(match[1]) > step):
                path.unlink()

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def check_run_name(root: Path | str, name: str, *, resume: bool, overwrite: bool) -> bool:
    """Whether a run of that name exists. The function changes nothing.

    Raises:
        UserError: as in `RunDirectory.create`.
    """
    if resume and overwrite:
        raise UserError("--resume and --overwrite contradict each other: keep the run or delete it")
    check_plain_name(name)
    path = Path(root) / name
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file; a run needs a folder there: choose another run.name")
    # More than a run leaves that ended before it began.
    existing = path.is_dir() and any(
        any(entry.iterdir())
        if entry.name in _EMPTY_AT_FIRST and entry.is_dir()
        else entry.name not in _NOT_A_RUN
        for entry in path.iterdir()
    )
    if existing and not (resume or overwrite):
        raise UserError(
            f"run {name!r} exists ({path}): continue it with --resume, replace it with --overwrite,"
            " or choose another run.name"
        )
    if existing and overwrite and not _is_ours(path):
        raise UserError(
            f"--overwrite: {path} does not look like a run (one has {LOCK}, and a {CONFIG} that"
            " rlcore wrote); delete it yourself, or choose another run.name"
        )
    return existing


def _is_ours(path: Path) -> bool:
    """Whether a folder has the lock and the configuration of a run."""
    try:
        return (path / LOCK).is_file() and (path / CONFIG).read_bytes().startswith(HEADER.encode())
    # There is none, or it is another user's.
    except OSError:
        return False


def check_plain_name(name: str) -> None:
    """Refuse a run name that cannot be a folder's name (UserError)."""
    is_plain = name and not name.startswith(".") and os.sep not in name and name.isprintable()
    if not is_plain or len(os.fsencode(name)) > _MAX_NAME_BYTES:
        raise UserError(
            f"run.name must be a plain folder name of at most {_MAX_NAME_BYTES} bytes that does not"
            f" start with a dot, got {name!r}"
        )


def _clear(path: Path) -> list[str]:
    """Delete a run's files except the lock. Returns the names of all other files, which stay.

    Files are first moved to `.<name>.trash` next to the folder. config.yaml goes last, so that a
    folder half emptied by a kill is still recognised as a run.
    """
    # Resolve a link to the run.
    path = path.resolve()
    trash = path.with_name(f".{path.name}.trash")
    shutil.rmtree(trash, ignore_errors=True)
    trash.mkdir(exist_ok=True)
    known = [one for one in vars(RunDirectory(path)).values() if isinstance(one, Path)]
    names = {one.name for one in known if one.parent == path} - {CONFIG}
    for name in (*sorted(names), *_MORE_OF_A_RUN, CONFIG):
        if os.path.lexists(path / name):
            os.rename(path / name, trash / name)
    # On NFS open files cannot be deleted.
    shutil.rmtree(trash, ignore_errors=True)
    return sorted(entry.name for entry in path.iterdir() if entry.name not in (LOCK, OWNER))
