"""The ways in which `launchers.py` starts a run: an entry in WAYS for each launcher.

Every run has two tensor-parallel trainer ranks and one engine. Nodes are process groups of this
machine; Ray's have addresses of their own.
"""

from __future__ import annotations

import secrets
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launching.programs import REPOSITORY, Program

EXAMPLE = REPOSITORY / "examples" / "addition"
RLCORE = (sys.executable, "-m", "rlcore")
START_S = 600  # for a server to be there, on a busy machine too


@dataclass(frozen=True)
class Task:
    """What is trained."""

    name: str  # of the run
    engine: str  # sglang | embedded
    overrides: Mapping[str, object]  # the same in every way
    scratch: Path  # a folder of this run's own, with a short path

    @property
    def files(self) -> list[str]:
        return [str(EXAMPLE / name) for name in ("base.yaml", "grpo.yaml")]

    @property
    def server_file(self) -> list[str]:
        return [str(EXAMPLE / "sglang.yaml")] if self.engine == "sglang" else []

    @property
    def server_keys(self) -> list[str]:
        """Overrides for the engine's command, beside `server_file`."""
        device = ["rollout.engine.device=cpu"] if self.engine == "sglang" else []
        return [*device, f"rollout.engine.start_timeout_s={START_S}"]

    @property
    def keys(self) -> list[str]:
        """Overrides for the trainer's command."""
        return [
            f"run.name={self.name}",
            *(f"{key}={value}" for key, value in self.overrides.items()),
            "--overwrite",
        ]

    @property
    def whole(self) -> list[str]:
        """Overrides for a launcher that starts everything by one configuration."""
        return [*self.files, *self.server_file, *self.keys, *self.server_keys]


def local(task: Task) -> list[Program]:
    return [Program("train", [*RLCORE, "train", *task.whole, "cluster.processes_per_node=2"])]


def torchrun(task: Task) -> list[Program]:
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    return [Program("train", [*agent, "-m", "rlcore", "train", *task.whole])]


def torchrun_nodes(task: Task) -> list[Program]:
    """Two agents of a rank each; the engine is a node of its own, found through a folder."""
    shared = {
        "PYTHON": sys.executable,
        "ENGINES": str(task.scratch / "engines"),
        "ENGINE_NODES": "1",
        "NNODES": "2",
        "GPUS_PER_NODE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HOST_ADDRESS": "127.0.0.1",
        "MAX_RESTARTS": "0",
        "RLCORE_ENGINE_API_KEY": secrets.token_hex(16),
        "RLCORE_ENGINE_ADMIN_KEY": secrets.token_hex(16),
    }
    trainer = [script("torchrun_multinode.sh"), *task.files, *task.keys]
    engine = [script("engines.sh"), *task.files, *task.server_file, *task.keys]
    return [
        *(
            Program(f"trainer_{node}", trainer, {**shared, "NODE_RANK": str(node)})
            for node in range(2)
        ),
        Program("engine", [*engine, *task.server_keys], shared, lasts=True),
    ]


def ray(task: Task) -> list[Program]:
    """A cluster of the run's own, of one node."""
    given = ["cluster.launcher=ray", "cluster.ray.address=local", "cluster.processes_per_node=2"]
    return [
        Program("train", [*RLCORE, "train", *task.whole, *given], {"RAY_TMPDIR": str(task.scratch)})
    ]


def ray_nodes(task: Task) -> list[Program]:
    """Three nodes, with room for the ranks and the engine on one each."""
    sizes = ["cluster.ray.rank_cpus=1", "cluster.ray.engine_cpus=3"]
    cluster = [sys.executable, str(REPOSITORY / "benchmarks" / "launching" / "cluster.py"), "1,2,3"]
    run = [
        *RLCORE,
        "train",
        *task.whole,
        "cluster.launcher=ray",
        "cluster.processes_per_node=2",
        *sizes,
    ]
    return [Program("train", [*cluster, *run], {"RAY_TMPDIR": str(task.scratch)})]


Way = Callable[[Task], Sequence[Program]]
WAYS: dict[str, tuple[str, Way]] = {
    "local": ("local", local),
    "torchrun": ("torchrun, one agent", torchrun),
    "torchrun-nodes": ("torchrun, two agents, the engine apart", torchrun_nodes),
    "ray": ("Ray, a local cluster", ray),
    "ray-nodes": ("Ray, three nodes: service, ranks, engine", ray_nodes),
}


def script(name: str) -> str:
    return str(REPOSITORY / "scripts" / name)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
