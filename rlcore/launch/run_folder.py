"""Taking a run's folder: a new one, or one to go on with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rlcore.config import Config
from rlcore.config.load import Loaded
from rlcore.desk import FINISHED
from rlcore.early_stopping import EarlyStopping
from rlcore.errors import UserError
from rlcore.runs.checkpoints import Checkpoint, CheckpointStore
from rlcore.runs.directory import RunDirectory
from rlcore.runs.files import remove_tree


@dataclass(frozen=True)
class OpenRun:
    """The run's folder, its checkpoints, and the one to go on from."""

    directory: RunDirectory
    checkpoints: CheckpointStore
    resume_from: Checkpoint | None


def open_run(loaded: Loaded, steps: int, stack: ExitStack, *, resume: bool, overwrite: bool) -> OpenRun:
    """Take the run's folder and find the point to go on from; a refused resume leaves the folder as it was."""
    config = loaded.config
    directory = RunDirectory.create(config.run.dir, config.run.name, resume=resume, overwrite=overwrite)
    stack.callback(directory.close)
    stack.push(lambda kind, *_: _give_back(directory, kind))
    checkpoints = CheckpointStore(directory.checkpoints, keep=config.checkpoint.keep)
    found = checkpoints.latest() if directory.resumed else None
    if found is not None:
        check_unfinished(config, found, steps, directory.read_result() or {})
    directory.write_config(config.model_dump(mode="json"), loaded.origins)
    return OpenRun(directory, checkpoints, found)


def check_unfinished(config: Config, found: Checkpoint, steps: int, result: Mapping[str, Any]) -> None:
    """Refuse to resume a run that has nothing left to do.

    Args:
        result: the content of result.json; a run that was killed after its last checkpoint has none, and its end to do.

    Raises:
        UserError: it has trained all its steps, or stopped early and would do so again.
    """
    name, stopping, kl = config.run.name, EarlyStopping.of(config.training), found.state.get("objective_kl")
    if result.get("status") not in FINISHED or result.get("steps") != found.step:
        return
    if found.step >= steps:
        raise UserError(
            f"run {name!r} is complete at step {found.step} of {steps}: "
            "nothing is left to train; raise training.steps to go on"
        )
    if stopping is not None and stopping.trips(kl):
        raise UserError(
            f"run {name!r} stopped early at step {found.step} of {steps}: objective/kl {kl:.6g} is above training.target_kl "
            f"{stopping.target_kl:g}; raise it, or set training.early_stopping=false, to go on"
        )


def _give_back(directory: RunDirectory, kind: type[BaseException] | None) -> None:
    """Bad input that shows before the first step leaves the name of a new run free."""
    if kind is not None and issubclass(kind, UserError) and not directory.resumed and not directory.metrics_path.exists():
        remove_tree(directory.path)
