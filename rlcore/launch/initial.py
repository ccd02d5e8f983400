"""Which shards a path means, and those that a run started from: its reference is the initial policy, also after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlcore.config.load import Loaded, load_config
from rlcore.errors import UserError
from rlcore.runs.checkpoints import latest_checkpoint
from rlcore.runs.directory import RunDirectory


def find_checkpoint(path: Path, key: str = "policy.checkpoint") -> Path:
    """The folder of shards that `path` means: a run (its newest checkpoint), a checkpoint, or the shards themselves.

    Raises:
        UserError: there is none; the message begins with `key`.
    """
    if (path / "checkpoints").is_dir():
        found = latest_checkpoint(path / "checkpoints")
        if found is None:
            raise UserError(f"{key}: run {path} has no checkpoint")
        return found.model
    if (path / "model").is_dir():
        return path / "model"
    if path.is_dir():
        return path
    raise UserError(f"{key}: {path} does not exist; expected a run, a checkpoint or its folder of shards")


def pin_initial_policy(loaded: Loaded, *, resume: bool) -> Loaded:
    """`policy.checkpoint` down to its folder of shards, which config.yaml then holds.

    A resumed run keeps the folder that it started from, whatever the run that `policy.checkpoint` names has trained since.

    Raises:
        UserError: that folder is gone.
    """
    given = loaded.config.policy.checkpoint
    if given is None:
        return loaded
    pinned = _started_from(loaded) if resume else None
    if pinned is None or not pinned.resolve().is_relative_to(Path(given).resolve()):
        pinned = find_checkpoint(Path(given))
    elif not pinned.is_dir():
        raise UserError(
            f"policy.checkpoint: the run started from {pinned}, which is gone: restore it, or name another checkpoint to "
            "measure the KL against"
        )
    config = loaded.config.model_copy(deep=True)
    config.policy.checkpoint = str(pinned)
    return replace(loaded, config=config)


def _started_from(loaded: Loaded) -> Path | None:
    run = loaded.config.run
    written = RunDirectory(Path(run.dir) / run.name).config_path
    checkpoint = load_config([written]).config.policy.checkpoint if written.is_file() else None
    return None if checkpoint is None else Path(checkpoint)
