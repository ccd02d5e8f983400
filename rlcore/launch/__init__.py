"""Starting runs: in this process, in several of this machine, as one of the ranks of torchrun, or
on a Ray cluster.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlcore.config.load import Loaded
from rlcore.errors import ConfigError, UserError
from rlcore.launch.rank import train_rank
from rlcore.launch.environment import under_torchrun


def train(loaded: Loaded, *, resume: bool, overwrite: bool, arguments: Sequence[str] = ()) -> int:
    """Run `rlcore train`. The exit code: 0 for completed and early_stopped, 130 for interrupted.

    Args:
        arguments: the command line after `rlcore`; the processes of a run with several are started
            with it.
    """
    config = loaded.config
    if (
        config.cluster.launcher == "local"
        and config.cluster.processes_per_node > 1
        and not under_torchrun()
    ):
        from rlcore.launch.compose import check_input
        from rlcore.launch.local import supervise

        check_input(config, config.cluster.processes_per_node, resume=resume, overwrite=overwrite)
        return supervise(config, arguments)
    if config.cluster.launcher == "torchrun" and not under_torchrun():
        raise ConfigError(
            "cluster.launcher is torchrun, but this process has no RANK: start it with `torchrun"
            " ... -m rlcore train ...`, or set cluster.launcher=local and"
            " cluster.processes_per_node"
        )
    if config.cluster.launcher == "ray":
        _need_ray()
        from rlcore.launch.ray.driver import drive

        return drive(loaded, resume=resume, overwrite=overwrite)
    return train_rank(loaded, resume=resume, overwrite=overwrite)


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
        raise UserError(
            "Ray is not installed here: `pip install 'rlcore[ray]'`, or use cluster.launcher local"
            " or torchrun"
        )


def engine(loaded: Loaded, *, urls_file: Path | None = None) -> int:
    """Run `rlcore engine`: the SGLang engines of a configuration alone, for a trainer that is given
    their URLs.
    """
    from rlcore.launch.commands.engine import serve_engines

    return serve_engines(loaded.config, urls_file=urls_file)


def export(source: Path, folder: Path) -> int:
    """Run `rlcore export`: write the weights of a checkpoint as a Hugging Face folder."""
    from rlcore.launch.commands.eval_export import export_checkpoint

    return export_checkpoint(source, folder)
