"""Starting runs: in this process, in several of this machine, as one of the ranks of torchrun, or on a Ray cluster."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlcore.config.load import Loaded
from rlcore.errors import ConfigError, RunFailed, UserError
from rlcore.launch.ranks import supervised, under_torchrun, wait_for_speaker

if TYPE_CHECKING:
    from rlcore.launch.compose import OpenService
    from rlcore.runs.directory import Status

FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130       # the exit code of a run that was asked to stop before its end


def train(loaded: Loaded, *, resume: bool, overwrite: bool, arguments: Sequence[str] = ()) -> int:
    """Run `rlcore train`. The exit code: 0 for completed and early_stopped, 130 for interrupted.

    Args:
        arguments: the command line after `rlcore`; the processes of a run with several are started with it.
    """
    config = loaded.config
    if config.cluster.launcher == "local" and config.cluster.processes_per_node > 1 and not under_torchrun():
        from rlcore.launch.compose import check_input
        from rlcore.launch.local import supervise

        check_input(config, config.cluster.processes_per_node, resume=resume, overwrite=overwrite)
        return supervise(config, arguments)
    if config.cluster.launcher == "torchrun" and not under_torchrun():
        raise ConfigError(
            "cluster.launcher is torchrun, but this process has no RANK: start it with `torchrun ... -m rlcore train ...`, "
            "or set cluster.launcher=local and cluster.processes_per_node"
        )
    if config.cluster.launcher == "ray":
        _need_ray()
        from rlcore.launch.ray.driver import drive

        return drive(loaded, resume=resume, overwrite=overwrite)
    return train_rank(loaded, resume=resume, overwrite=overwrite)


def train_rank(loaded: Loaded, *, resume: bool, overwrite: bool, service: OpenService | None = None) -> int:
    """One rank of a run, from joining the others to its exit code.

    Args:
        service: how rank 0 opens the rollout service; default: in this process.
    """
    from rlcore.launch.attempts import RunHasEnded
    from rlcore.launch.compose import run_rank
    from rlcore.launch.logs import describe
    from rlcore.launch.process import join
    from rlcore.trainer.rank_sync import PeerFailed

    rank = 0
    try:
        with join(loaded.config) as process:
            rank, goes_on = process.rank, process.attempt.goes_on       # --overwrite has done its work then
            outcome = run_rank(
                process, loaded, resume=resume or goes_on, overwrite=overwrite and not goes_on, service=service
            )
    except RunHasEnded as ended:
        return ended.code
    except PeerFailed as error:
        if rank != 0 or supervised():       # somebody else tells the user
            wait_for_speaker()
            return FAILED
        raise RunFailed(describe(error.failure, loaded.config.run)) from error
    return exit_code(outcome.status)


def exit_code(status: Status) -> int:
    """Of a run that did not fail."""
    return INTERRUPTED if status == "interrupted" else 0


def evaluate(loaded: Loaded, *, output: Path | None) -> int:
    """Run `rlcore eval`: score the configured model on the evaluation prompts, in this process."""
    from rlcore.launch.commands.eval_export import evaluate_model

    return evaluate_model(loaded, output)


def status(address: str | None) -> Iterator[str]:
    """Run `rlcore status`: lines about every run on a Ray cluster."""
    _need_ray()
    from rlcore.launch.ray import status as commands

    return commands.status(address)


def stop(run: str, address: str | None, *, timeout_s: float) -> str:
    """Run `rlcore stop`: ask a run on a Ray cluster for a clean end, and wait for it."""
    _need_ray()
    from rlcore.launch.ray import status as commands

    return commands.stop(run, address, timeout_s=timeout_s)


def _need_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UserError("Ray is not installed here: `pip install 'rlcore[ray]'`, or use cluster.launcher local or torchrun")


def engine(loaded: Loaded, *, urls_file: Path | None = None) -> int:
    """Run `rlcore engine`: the SGLang engines of a configuration alone, for a trainer that is given their URLs."""
    from rlcore.launch.commands.engine import serve_engines

    return serve_engines(loaded.config, urls_file=urls_file)


def export(source: Path, folder: Path) -> int:
    """Run `rlcore export`: write the weights of a checkpoint as a Hugging Face folder."""
    from rlcore.launch.commands.eval_export import export_checkpoint

    return export_checkpoint(source, folder)
