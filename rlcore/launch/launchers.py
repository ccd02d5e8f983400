"""Starts a run with the launcher that its configuration names: local, torchrun or ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from rlcore.config.load import Loaded
from rlcore.errors import ConfigError, UserError
from rlcore.launch.environment import is_rank, resolved_by_launcher


def train(loaded: Loaded, *, resume: bool, overwrite: bool, arguments: Sequence[str] = ()) -> int:
    """Run `rlcore train`; return 0 for completed and early_stopped, 130 for interrupted.

    Args:
        arguments: the command line after `rlcore`, passed on to the ranks of a local run.
    """
    config = loaded.config
    if (
        config.cluster.launcher == "local"
        and config.cluster.processes_per_node > 1
        and not is_rank()
    ):
        from rlcore.launch.input_checks import check_input
        from rlcore.launch.local import launch_ranks

        check_input(config, config.cluster.processes_per_node, resume=resume, overwrite=overwrite)
        return launch_ranks(loaded, arguments)
    if config.cluster.launcher == "torchrun" and not is_rank():
        raise ConfigError(
            "cluster.launcher is torchrun, but this process has no RANK: start it with `torchrun"
            " ... -m rlcore train ...`, or set cluster.launcher=local and"
            " cluster.processes_per_node"
        )
    if config.cluster.launcher == "ray":
        need_ray()
        from rlcore.launch.ray.driver import drive

        return drive(loaded, resume=resume, overwrite=overwrite)
    from rlcore.launch.rank import train_rank

    is_checked = resolved_by_launcher() is not None
    return train_rank(loaded, resume=resume, overwrite=overwrite, is_checked=is_checked)


def need_ray() -> None:
    """Raise UserError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(
            "Ray is not installed here: `pip install 'rlcore[ray]'`, or use cluster.launcher local"
            " or torchrun"
        )
