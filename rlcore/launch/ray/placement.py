"""Computes a run's resource requests to Ray and the bundles of its parts. Pure: no ray, no torch.

A trainer node is one bundle, so that its ranks share a machine; the bundles are packed. Each engine
has its own bundle, and these are spread. Colocated engines are in the bundles of the ranks whose
GPUs they share, equally many in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlcore.config import Config
from rlcore.config.derived import gpus_per_node, hosted_engines

Resources = dict[str, float]


@dataclass(frozen=True)
class Placement:
    """The resources of each part, by Ray's names."""

    rank: Resources  # of one rank
    trainer: tuple[Resources, ...]  # a bundle per node, for its ranks in order
    engine: Resources  # of one engine
    # A bundle for each engine; () without engines, or if they are in the trainer's bundles.
    engines: tuple[Resources, ...]
    # The index of each engine's bundle in `engines`, or in `trainer` if `engines` is empty.
    hosts: tuple[int, ...]

    @property
    def shares_gpus(self) -> bool:
        """Whether engines are in the trainer's bundles."""
        return bool(self.hosts) and not self.engines

    @property
    def total(self) -> Resources:
        """The resources of all parts together."""
        return added(*self.trainer, *self.engines)


def place(config: Config, *, has_gpus: bool) -> Placement:
    """Return the placement of a run on a cluster with GPUs, or with CPUs only."""
    cluster = config.cluster
    engine = config.rollout.engine
    asked = cluster.ray
    count = hosted_engines(config)
    engine_gpus = asked.engine_gpus * engine.tensor_parallel if has_gpus else 0.0
    host = _resources(asked.engine_cpus, 0.0 if engine.device == "cpu" else engine_gpus)
    hosts = tuple(range(count))
    engines = (host,) * count
    node = _resources(
        asked.rank_cpus * cluster.processes_per_node, gpus_per_node(config) if has_gpus else 0.0
    )
    # Colocated engines are on their ranks' GPUs, but need their own CPUs.
    if engine.colocated and count:
        host = _resources(asked.engine_cpus, 0.0)
        on_each = count // cluster.nodes
        node = added(node, *(host,) * on_each)
        hosts = tuple(index // on_each for index in range(count))
        engines = ()
    return Placement(
        rank=_resources(asked.rank_cpus, asked.rank_gpus if has_gpus else 0.0),
        trainer=(node,) * cluster.nodes,
        engine=host,
        engines=engines,
        hosts=hosts,
    )


def lacking(placement: Placement, cluster: Mapping[str, float]) -> str | None:
    """Name the resources of which the whole cluster has too little; None if it has enough.

    Args:
        cluster: the cluster's resources, used and free.
    """
    short = [
        f"{amount:g} {name} (the cluster has {cluster.get(name, 0.0):g})"
        for name, amount in placement.total.items()
        if amount > cluster.get(name, 0.0) + 1e-6
    ]
    return ", ".join(short) or None


def added(*parts: Resources) -> Resources:
    """Add up resources by name."""
    return {
        name: sum(part.get(name, 0.0) for part in parts)
        for name in dict.fromkeys(n for part in parts for n in part)
    }


def bundles(parts: Sequence[Resources]) -> list[Resources]:
    """Leave out zero amounts, and fill an empty bundle; Ray rejects both."""
    return [
        {name: amount for name, amount in part.items() if amount} or {"CPU": 0.001}
        for part in parts
    ]


def _resources(cpus: float, gpus: float) -> Resources:
    return {"CPU": cpus, **({"GPU": gpus} if gpus else {})}
