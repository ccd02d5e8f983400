"""Opens a run's folder, new or resumed, and writes the result if the trainer cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from rlcore.config import Config
from rlcore.config.load import Loaded, load_config
from rlcore.config.path_keys import path_error, split_reference
from rlcore.config.sections.base import CHECKPOINT
from rlcore.errors import DataError, UserError
from rlcore.runs.checkpoints import (
    Checkpoint,
    CheckpointStore,
    committed_steps,
    latest_checkpoint,
    read_best,
    read_checkpoint,
    step_name,
)
from rlcore.runs.directory import ResultMark, RunDirectory, Status
from rlcore.runs.lock import lock_holder
from rlcore.runs.metrics import read_metrics
from rlcore.stores import Store
from rlcore.timeline.recorder import RECORDER
from rlcore.trainer.rank0 import FINISHED, EarlyStopping
from rlcore.trainer.rank_sync import in_one_line

_OPENED = "opened"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenRun:
    """The run's folder, its checkpoints, and the checkpoint to resume from."""

    directory: RunDirectory
    checkpoints: CheckpointStore
    resume_from: Checkpoint | None

    def end_with(self, error: BaseException) -> None:
        """Free the run's name after bad input; after other errors, write a missing result."""
        directory = self.directory
        if directory.has_ended:
            return
        if not isinstance(error, UserError):
            status: Status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            conclude(directory, status, in_one_line(error))
        elif not directory.resumed and not directory.metrics_path.exists():
            try:
                directory.discard()
            except OSError as second:
                # A second error must not hide the first.
                logger.warning("%s was not removed: %s", directory.path, second)


def conclude(directory: RunDirectory, status: Status, reason: str) -> None:
    """Write the result of a run whose trainer cannot. Errors here must not hide the first error."""
    try:
        rows = read_metrics(directory.metrics_path)
        directory.write_result(status, rows[-1]["step"] if rows else 0, reason)
    except (OSError, DataError) as second:
        logger.error("result.json could not be written: %s", second)


def result_mark(config: Config) -> ResultMark | None:
    """Return a mark of the result of this run's earlier start, if there is a result."""
    return RunDirectory(Path(config.run.dir) / config.run.name).result_mark()


def conclude_unless_written(
    config: Config, status: Status, reason: str, *, earlier: ResultMark | None
) -> None:
    """Write a result, unless rank 0 has done so; a killed rank 0 has not.

    Args:
        earlier: the `result_mark` from before the ranks were started.
    """
    directory = RunDirectory(Path(config.run.dir) / config.run.name)
    if directory.read_result(but=earlier) is None:
        conclude(directory, status, reason)


def open_run(
    loaded: Loaded, steps: int, stack: ExitStack, *, resume: bool, overwrite: bool
) -> OpenRun:
    """Open the run's folder and find its newest checkpoint; a rejected resume changes nothing."""
    config = loaded.config
    directory = RunDirectory.create(
        config.run.dir, config.run.name, resume=resume, overwrite=overwrite
    )
    stack.callback(directory.close)
    checkpoints = CheckpointStore(directory.checkpoints, keep=config.checkpoint.keep)
    found = latest_checkpoint(checkpoints.folder) if directory.resumed else None
    run = OpenRun(directory, checkpoints, found)
    stack.push(lambda _, error, __: run.end_with(error) if error is not None else None)
    # A resumed run keeps its configuration file until all checks have passed.
    if found is None:
        directory.write_config(config.model_dump(mode="json"), loaded.origins)
    else:
        _check_unfinished(config, found, steps, directory.read_result() or {})
    return run


def describe_run(run: Path) -> Iterator[str]:
    """Yield the output of `rlcore status RUN`: the run's progress and its engines.

    Raises:
        UserError: there is no such run.
        DataError: its metrics are damaged.
    """
    directory = RunDirectory(run)
    if not directory.config_path.is_file():
        raise UserError(f"{run} has no {directory.config_path.name}; expected the folder of a run")
    rows = read_metrics(directory.metrics_path)
    result = directory.read_result()
    holder = lock_holder(run)
    if holder is not None:
        state = f"is running ({holder})"
    elif result is not None:
        state = f"has ended: {result.get('status')}"
    else:
        state = "is held by no process: it was killed, or its file system has no locks"
    yield f"{directory.name}: step {rows[-1]['step'] if rows else 0}, {state}"
    # The file of a run that has ended holds the last states, of engines that it has ended too.
    for line in engine_lines(run) if holder is not None or result is None else ():
        yield f"  {line}"


def engine_lines(run: Path) -> Iterator[str]:
    """Yield a line for each engine of a run that has started."""
    path = RunDirectory(run).engines_path
    for row in orjson.loads(path.read_bytes()) if path.is_file() else []:
        address = f" at {row['url']}" if row["url"] else ""
        yield (
            f"{row['engine']}{address}: {row['state']}, version {row['version']},"
            f" {row['requests']} requests, {row['restarts']} restarts"
        )


def record_timeline(config: Config, process: str) -> Callable[[], None]:
    """Record this process's timeline in the run's folder. Returns the function that stops it."""
    folder = RunDirectory(Path(config.run.dir) / config.run.name).timeline
    RECORDER.open(folder, process, limit_bytes=config.tracking.timeline_mb << 20)
    return RECORDER.close


def mark_opened(store: Store) -> None:
    """Notify the launcher that the ranks have opened the folder, so it may write a result there."""
    store.set(_OPENED, "")


def was_opened(store: Store) -> bool:
    """Return whether `mark_opened` was called."""
    return store.check([_OPENED])


def _check_unfinished(
    config: Config, found: Checkpoint, steps: int, result: Mapping[str, Any]
) -> None:
    """Raise UserError for a run that has trained all its steps, or would stop early again."""
    # A run that was killed after its last checkpoint is resumed to write its result.
    if result.get("status") not in FINISHED or result.get("steps") != found.step:
        return
    stopping = EarlyStopping.of(config.training)
    kl = found.state.get("objective_kl")
    where = f"at step {found.step} of {steps}"
    if found.step >= steps:
        raise UserError(
            f"run {config.run.name!r} is complete {where}: nothing is left to train; raise"
            " training.steps to continue"
        )
    if stopping is not None and stopping.trips(kl):
        raise UserError(
            f"run {config.run.name!r} stopped early {where}: objective/kl {kl:.6g} is above"
            f" training.target_kl {stopping.target_kl:g}; raise it, or set"
            " training.early_stopping=false, to continue"
        )


def find_checkpoint(path: Path, key: str = "policy.checkpoint") -> Path:
    """Find the folder of shards of a run (its newest checkpoint), a checkpoint, or shards.

    `RUN@10` is a run's checkpoint of step 10, `RUN@best` the one that `checkpoint.best` kept.

    Raises:
        UserError: there is no such checkpoint; the message begins with `key`.
    """
    run, which = split_reference(path)
    folder = run / "checkpoints"
    if which:
        best = read_best(folder) if which == "best" else None
        if which == "best" and best is None:
            raise UserError(
                f"{key}: {run} has no best checkpoint: checkpoint.best was not given, or no"
                " evaluation after a step had its metric"
            )
        step = int(which) if best is None else best.step
        steps = committed_steps(folder)
        if step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise UserError(f"{key}: {run} has no checkpoint of step {step}, but of: {known}")
        return read_checkpoint(folder / step_name(step)).model
    if folder.is_dir():
        found = latest_checkpoint(folder)
        if found is None:
            raise UserError(f"{key}: run {path} has no checkpoint")
        return found.model
    if (path / "model").is_dir():
        return path / "model"
    if problem := path_error(str(path), CHECKPOINT):
        raise UserError(f"{key}: {problem}")
    return path


def pin_initial_policy(loaded: Loaded, *, resume: bool) -> Loaded:
    """Resolve `policy.checkpoint` to its folder of shards, for config.yaml.

    A resumed run keeps the folder that it started from, even if the run that `policy.checkpoint`
    names has newer checkpoints by now.

    Raises:
        UserError: that folder is gone.
    """
    config = loaded.config.model_copy(deep=True)
    if config.policy.checkpoint is None:
        return loaded
    given = Path(config.policy.checkpoint)
    written = RunDirectory(Path(config.run.dir) / config.run.name).config_path
    before = None
    if resume and written.is_file():
        before = load_config([written]).config.policy.checkpoint
    pinned = None if before is None else Path(before)
    run, _ = split_reference(given)
    if pinned is None or not pinned.resolve().is_relative_to(run.resolve()):
        pinned = find_checkpoint(given)
    elif not pinned.is_dir():
        raise UserError(
            f"policy.checkpoint: the run started from {pinned}, which is gone: restore it, or name"
            " another checkpoint to measure the KL against"
        )
    config.policy.checkpoint = str(pinned)
    return replace(loaded, config=config)
