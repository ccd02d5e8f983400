"""Checks of `cluster.launcher: ray`. Pure: no torch, no ray, no network."""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.problems import Problem
from rlcore.config.root import Config
from rlcore.config.training import RayConfig


def ray_launcher(config: Config) -> Iterator[Problem]:
    """What Ray places is left to Ray."""
    cluster, engine = config.cluster, config.rollout.engine
    if cluster.launcher != "ray":
        return
    address = cluster.ray.address
    if address is not None and "://" in address:
        message = f"got {address!r}, expected HOST:PORT of the cluster's head node: start `rlcore train` on one of its nodes"
        yield Problem("cluster.ray.address", message)
    if engine.in_process:
        yield Problem("rollout.engine.in_process", "got true, but under Ray every engine is an actor: leave it out")
    if engine.gpus:
        yield Problem("rollout.engine.gpus", f"got {engine.gpus}, but Ray chooses GPUs: leave it out")
    if engine.colocated and cluster.nodes > 1:
        message = "got true, but engines that share the trainer's GPUs take weights by handles, which hold on one machine: "
        yield Problem("rollout.engine.colocated", message + "set cluster.nodes to 1, or give engines GPUs of their own")


def ray_notes(config: Config) -> Iterator[Problem]:
    """What only Ray reads."""
    if config.cluster.launcher != "ray" and config.cluster.ray != RayConfig():
        yield Problem("cluster.ray", f"is ignored: cluster.launcher is {config.cluster.launcher}")
