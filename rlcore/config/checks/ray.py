"""Checks of `cluster.launcher: ray`. Pure: no torch, no ray, no network."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlcore.config.derived import generates, gpus_of_a_node
from rlcore.config.engine_registry import is_import_path
from rlcore.config.messages import Problem
from rlcore.config.sections.root import Config
from rlcore.config.sections.training import RayConfig


def ray_launcher(config: Config) -> Iterator[Problem]:
    """What Ray places is left to Ray."""
    cluster = config.cluster
    engine = config.rollout.engine
    if cluster.launcher != "ray":
        return
    address = cluster.ray.address
    if address is not None and "://" in address:
        message = (
            f"got {address!r}, expected HOST:PORT of the cluster's head node: start `rlcore train`"
            " on one of its nodes"
        )
        yield Problem("cluster.ray.address", message)
    if engine.colocated and is_import_path(engine.kind):
        yield Problem(
            "rollout.engine.colocated",
            "under Ray an engine of another package runs in the rollout service's process, which"
            " has no GPU: turn it off, or use another cluster.launcher",
        )
    if engine.gpus:
        yield Problem(
            "rollout.engine.gpus", f"got {engine.gpus}, but Ray chooses GPUs: leave it out"
        )
    yield from _gpu_shares(config)


def _gpu_shares(config: Config) -> Iterator[Problem]:
    """Refuse shares that Ray does not give: it gives a share of one GPU, or whole GPUs."""
    ray = config.cluster.ray
    engine = config.rollout.engine
    if not (ray.rank_gpus < 1 or ray.rank_gpus.is_integer()):
        yield Problem(
            "cluster.ray.rank_gpus",
            f"got {ray.rank_gpus:g}, but Ray gives a share of one GPU or a whole number",
        )
    if engine.device == "cpu" or engine.is_external or not generates(config):
        return
    needed = engine.count * engine.tensor_parallel
    width = engine.tensor_parallel
    if engine.colocated and needed > (there := math.ceil(gpus_of_a_node(config))) > 0:
        yield Problem(
            "rollout.engine.count",
            f"{engine.count} x rollout.engine.tensor_parallel {width} need {needed} GPUs, but the"
            f" ranks, whose GPUs they share, have {there}: use fewer or smaller engines",
        )
    elif (
        not engine.colocated
        and not ray.engine_gpus.is_integer()
        and (ray.engine_gpus > 1 or width > 1)
    ):
        yield Problem(
            "cluster.ray.engine_gpus",
            f"got {ray.engine_gpus:g}, but Ray gives a share of one GPU or a whole number, and an"
            f" engine needs one GPU for each of its {width} tensor-parallel ranks: set it to 1",
        )


def ray_notes(config: Config) -> Iterator[Problem]:
    """Yield `cluster.ray` where another launcher ignores it."""
    if config.cluster.launcher != "ray" and config.cluster.ray != RayConfig():
        yield Problem("cluster.ray", f"is ignored: cluster.launcher is {config.cluster.launcher}")
