"""Starting runs: in this process, in several processes of this machine, or as one of the ranks that torchrun started."""

from __future__ import annotations

import sys
from pathlib import Path

from rlcore.config.load import Loaded
from rlcore.errors import ConfigError

INTERRUPTED = 130       # the exit code of a run that was asked to stop before its end


def train(loaded: Loaded, *, resume: bool, overwrite: bool) -> int:
    """Run `rlcore train`. The exit code: 0 for completed and early_stopped, 130 for interrupted."""
    from rlcore.launch.process import join, under_torchrun

    config = loaded.config
    if config.cluster.launcher == "local" and config.cluster.processes_per_node > 1 and not under_torchrun():
        from rlcore.launch.supervise import supervise

        return supervise(config, sys.argv[1:])
    if config.cluster.launcher == "torchrun" and not under_torchrun():
        raise ConfigError(
            "cluster.launcher is torchrun, but this process has no RANK: start it with `torchrun ... -m rlcore train ...`, "
            "or set cluster.launcher=local and cluster.processes_per_node"
        )
    from rlcore.launch.compose import run_rank

    with join(config) as process:
        outcome = run_rank(process, loaded, resume=resume, overwrite=overwrite)
    return INTERRUPTED if outcome.status == "interrupted" else 0


def evaluate(loaded: Loaded, *, output: Path | None) -> int:
    """Run `rlcore eval`: score the configured model on the evaluation prompts, in this process."""
    from rlcore.launch.single import evaluate_model

    return evaluate_model(loaded, output)


def export(source: Path, folder: Path) -> int:
    """Run `rlcore export`: write the weights of a checkpoint as a Hugging Face folder."""
    from rlcore.launch.single import export_checkpoint

    return export_checkpoint(source, folder)
