"""`rlcore export` writes a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from rlcore.config.load import load_config
from rlcore.errors import UserError
from rlcore.launch.compose import export_policy
from rlcore.launch.run_folder import find_checkpoint
from rlcore.runs.directory import RunDirectory


def export_checkpoint(source: Path, folder: Path, *, merged: bool = False) -> int:
    """Write a checkpoint of any layout as a Hugging Face folder, on the CPU, without the model.

    Args:
        merged: write a whole model, where the run trained adapters.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is not a folder: choose another name")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty: choose another folder")
    shards = find_checkpoint(source, "export")
    run = RunDirectory(
        next((p for p in (shards, *shards.parents) if (p / "config.yaml").is_file()), shards)
    )
    if not run.config_path.is_file():
        raise UserError(
            f"{source}: no config.yaml in it or above it; expected a run or one of its checkpoints"
        )
    export_policy(load_config([run.config_path]).config, shards, folder, merged=merged)
    print(f"wrote {folder}")
    return 0
