"""Starts a run of the soak, and finds processes to kill; launchers are in LAUNCHERS."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import psutil

from tests.ports import free_port
from tests.soak.network import Network

ROOT = Path(__file__).resolve().parents[2]
MARK = "RLCORE_SOAK_RUN"  # environment of every process of a run: its folder
GONE_S = 60.0  # from the end of the nodes to the end of everything
SETTLE_S = 5.0  # for the other nodes to end too, where the run has ended
STORE_BYTES = 100 << 20  # of each Ray node's objects
POLL_S = 0.01
# What tells Ray nodes of one machine apart, and how long one of them waits for a lost head.
OF_ONE_MACHINE = ("HOST_ADDRESS", "RAY_gcs_rpc_server_reconnect_timeout_s")

Command = tuple[list[str], dict[str, str]]  # with its environment


@dataclass(frozen=True)
class Launcher:
    """Makes the commands of a run's nodes, each a process group, for `rlcore train`'s arguments."""

    name: str
    # What is killed, in turn: keys of VICTIMS, or a "node" or its "raylet" with all that it runs.
    kinds: tuple[str, ...]
    commands: Callable[[Sequence[str]], list[Command]]


def _local(arguments: Sequence[str]) -> list[Command]:
    return [
        ([sys.executable, "-m", "rlcore", "train", *arguments, "cluster.processes_per_node=2"], {})
    ]


def _torchrun(arguments: Sequence[str], head: str = "127.0.0.1") -> list[Command]:
    script = [str(ROOT / "scripts" / "torchrun_multinode.sh"), *arguments]
    shared = {
        "NNODES": "2",
        "MASTER_ADDR": head,
        "MASTER_PORT": str(free_port()),
        "GPUS_PER_NODE": "1",
        "PYTHON": sys.executable,
    }
    return [(script, {**shared, "NODE_RANK": str(node)}) for node in range(2)]


def _ray(arguments: Sequence[str]) -> list[Command]:
    """A cluster of this run's own, of one node."""
    given = ["cluster.launcher=ray", "cluster.ray.address=local", "cluster.processes_per_node=2"]
    return [([sys.executable, "-m", "rlcore", "train", *arguments, *given], {})]


def _ray_nodes(arguments: Sequence[str]) -> list[Command]:
    """A head and a node, each with an address, and together one CPU more than the run takes."""
    from ray.util import get_node_ip_address

    head = get_node_ip_address()  # Ray takes no loopback address for a head's
    shared = {
        "MASTER_ADDR": head,
        "RAY_PORT": str(free_port()),
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "PYTHON": sys.executable,
        "JOIN_TIMEOUT_S": "200",
        # a node ends so soon after the head, not after 60 s
        "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    }
    script = [
        str(ROOT / "scripts" / "ray_multinode.sh"),
        *arguments,
        "cluster.processes_per_node=2",
    ]
    own = (
        f"--num-cpus 2 --include-dashboard false --ray-client-server-port {free_port()}",
        "--num-cpus 3",
    )
    common = (
        f"--include-log-monitor false --object-store-memory {STORE_BYTES} --min-worker-port 0"
        " --max-worker-port 0"
    )
    return [
        (script, {**shared, "NODE_RANK": str(node), "HOST_ADDRESS": f"127.0.0.{node + 1}",
                  "RAY_ARGS": f"{more} {common} {_agents_ports()}"})
        for node, more in enumerate(own)
    ]  # fmt: skip


def _ray_network(arguments: Sequence[str]) -> list[Command]:
    """The same on nodes with addresses of their own, to which a cut cable is no lost head."""
    return [
        (words, {name: value for name, value in given.items() if name not in OF_ONE_MACHINE}
         | {"MASTER_ADDR": "node-0"})
        for words, given in _ray_nodes(arguments)
    ]  # fmt: skip


def _slurm(arguments: Sequence[str]) -> list[Command]:
    """A job of two nodes. `sbatch --wait` ends with its exit code."""
    log = Path(arguments[0]).with_name("slurm-%j.log")
    options = ["--wait", "--nodes=2", f"--output={log}", "--open-mode=append"]
    script = str(ROOT / "scripts" / "slurm" / "torchrun.sbatch")
    given = {"ENGINE_NODES": "0", "GPUS_PER_NODE": "1", "PYTHON": sys.executable}
    return [(["sbatch", *options, script, *arguments], given)]


LAUNCHERS = {
    made.name: made
    for made in (
        Launcher("local", ("engine", "rank", "service"), _local),
        Launcher("torchrun", ("engine", "rank", "node", "service"), _torchrun),
        Launcher("ray", ("engine", "rank", "service"), _ray),
        Launcher(
            "ray-nodes", ("raylet", "service", "engine", "raylet", "service", "rank"), _ray_nodes
        ),
    )
}


# On nodes with networks of their own.
NETWORK = {
    made.name: made
    for made in (
        replace(LAUNCHERS["torchrun"], commands=partial(_torchrun, head="node-0")),
        replace(LAUNCHERS["ray-nodes"], commands=_ray_network),
        Launcher("slurm", ("node", "engine", "rank", "service"), _slurm),
    )
}


# --- processes ------------------------------------------------------------------------------------


def _is_engine(process: psutil.Process) -> bool:
    return "rollout.engines.embedded.server" in process.cmdline()


def _is_rank(process: psutil.Process) -> bool:
    command = process.cmdline()
    return _is_actor(process, "RankActor") or (
        "RANK" in process.environ() and "rlcore" in command and "train" in command
    )


def _is_service(process: psutil.Process) -> bool:
    return "rlcore.launch.service.child" in process.cmdline()


def _is_raylet(process: psutil.Process) -> bool:
    return any(Path(part).name == "raylet" for part in process.cmdline()[:1])


def _is_actor(process: psutil.Process, name: str) -> bool:
    return any(part.startswith(f"ray::{name}") for part in process.cmdline()[:1])


VICTIMS: dict[str, Callable[[psutil.Process], bool]] = {
    "engine": _is_engine,
    "rank": _is_rank,
    "service": _is_service,
}


@dataclass
class Started:
    """One life of a run: its nodes and all that they start."""

    folder: Path
    log: Path
    commands: list[Command]
    network: Network | None = None
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _lost: dict[int, float] = field(default_factory=dict)  # nodes -> when it was seen

    @classmethod
    def start(
        cls,
        launcher: Launcher,
        folder: Path,
        arguments: Sequence[str],
        log: Path,
        network: Network | None = None,
    ) -> Started:
        started = cls(folder, log, launcher.commands(arguments), network)
        started.nodes = [started._node(number) for number in range(len(started.commands))]
        return started

    def tend(self) -> None:
        """Restart lost nodes after a while, as a cluster would; the run ends with the first."""
        if self.network is not None:
            self.network.tend()
        now = time.monotonic()
        for number, code in enumerate(self.codes):
            if (
                number
                and code
                and self.codes[0] is None
                and now > self._lost.setdefault(number, now) + SETTLE_S
            ):
                self.nodes[number] = self._node(number)
                del self._lost[number]

    def _node(self, number: int) -> subprocess.Popen[bytes]:
        words, environment = self.commands[number]
        if self.network is not None:
            words = [*self.network.cluster.inside(self.network.cluster.nodes[number]), *words]
            environment = {**environment, **self.network.environment}
        given = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            MARK: str(self.folder),
            **environment,
        }
        with self.log.open("ab") as output:
            return subprocess.Popen(
                words, stdout=output, stderr=output, env=given, start_new_session=True
            )

    @property
    def codes(self) -> list[int | None]:
        return [node.poll() for node in self.nodes]

    @property
    def ended(self) -> bool:
        return None not in self.codes

    def wait(self, seconds: float) -> bool:
        """Wait, without ending any node; return whether all have ended in time."""
        deadline = time.monotonic() + seconds
        while not self.ended and time.monotonic() < deadline:
            self.tend()
            time.sleep(POLL_S)
        return self.ended

    def processes(self) -> list[psutil.Process]:
        """All processes below the nodes or, in a job of Slurm, on them, and orphans.

        Orphans have MARK in their environment, over which Ray's workers write their names.
        """
        below = {
            child.pid
            for node in self.nodes
            if node.poll() is None
            for child in _with_children(node.pid)
        }
        if self.network is not None and self.network.slurm is not None:
            below |= {task.pid for task in self.network.slurm.tasks()}
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                ours = process.pid in below or process.environ().get(MARK) == str(self.folder)
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def victims(self, kind: str) -> list[list[psutil.Process]]:
        """The processes that a kill of this kind ends, for each victim, in a fixed order."""
        if kind == "node" and self.network is not None and self.network.slurm is not None:
            return [self.network.cluster.processes(1)]
        if kind == "node":
            return [_with_children(node.pid) for node in self.nodes if node.poll() is None]
        if kind == "raylet":  # without the head's the run ends, as Ray has it
            below = [
                child
                for node in self.nodes[1:]
                if node.poll() is None
                for child in _with_children(node.pid)
            ]
            return [
                _with_children(process.pid) for process in below if _is_there(process, _is_raylet)
            ]
        found: dict[int, psutil.Process] = {}
        forked = set()  # children of victims, which look alike
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                if VICTIMS[kind](process):
                    found[process.pid] = process
                    forked |= {child.pid for child in process.children()}
        return [[process] for pid, process in sorted(found.items()) if pid not in forked]

    def left(self) -> list[str]:
        """Describe, and end, processes that outlive the ended nodes, which is a fault."""
        deadline = time.monotonic() + GONE_S
        while (processes := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        described = []
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                described.append(f"{process.pid} {' '.join(process.cmdline())[:200]}")
                process.kill()
        return described

    def kill(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _is_there(process: psutil.Process, what: Callable[[psutil.Process], bool]) -> bool:
    with suppress(psutil.NoSuchProcess):
        return what(process)
    return False


def _with_children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        node = psutil.Process(pid)
        return [node, *node.children(recursive=True)]
    return []


def _agents_ports() -> str:
    """Name the ports of what a Ray node starts beside its raylet: else it waits 15 s for each."""
    agents = (
        "dashboard-agent-grpc",
        "dashboard-agent-listen",
        "metrics-export",
        "runtime-env-agent",
    )
    return " ".join(f"--{name}-port {free_port()}" for name in agents)
