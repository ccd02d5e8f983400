"""A Slurm of a cluster's nodes: its real daemons, each in the namespaces of its node."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

from tests.network.cluster import Cluster

DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch")
WAIT_S = 120.0
CALL_S = 30.0
LOST_S = 15  # until a node that does not answer counts as lost
# No control groups, no accounting; GPUs that are only counted, so that the templates' own lines
# hold. A requeued job waits until its old credentials have expired: 120 s by default.
CONFIG = """
ClusterName=nodes
SlurmctldHost=node-0({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={lost}
KillWait=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def why_no_slurm() -> str:
    """Which of Slurm's programs this machine has not; "" if it has all."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [name for name in DAEMONS if shutil.which(name, path=path) is None]
    if not missing:
        return ""
    return f"no {', '.join(missing)}: ./scripts/install_debian.sh slurm-wlm slurmctld"


class Slurm:
    """The controller on node 0 and a daemon on every node; jobs are submitted on node 0."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.folder = cluster.folder / "slurm"
        nodes = range(len(cluster.nodes))
        for name in ("state", *(f"spool-node-{node}" for node in nodes)):
            (self.folder / name).mkdir(parents=True)
        config = self.folder / "slurm.conf"
        described = "\n".join(
            f"NodeName=node-{node} NodeAddr={cluster.address(node)} CPUs=8 RealMemory=1 Gres=gpu:8"
            for node in nodes
        )
        config.write_text(
            CONFIG.format(head=cluster.address(0), folder=self.folder, lost=LOST_S, nodes=described)
        )
        devices = [self.folder / f"gpu{number}" for number in range(8)]
        for device in devices:
            device.symlink_to("/dev/null")
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-7]\n")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.environment = {"SLURM_CONF": str(config), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        self._start(
            0,
            *("munged", "--foreground", "--force", f"--key-file={key}"),
            *(f"--{name}-file={self.folder / f'munge.{name}'}" for name in ("pid", "log", "seed")),
            f"--socket={self.folder / 'munge.socket'}",
        )
        self.until((self.folder / "munge.socket").exists, "munged opens no socket")
        self._start(0, "slurmctld", "-D")
        for node in nodes:
            self.join(node)
        self.until(lambda: self.states == ["idle"] * len(nodes), "nodes do not join")

    def join(self, node: int) -> None:
        """Start a node's daemon, also after the node was switched off."""
        self._start(node, "slurmd", "-D")

    def submit(
        self, script: str, *arguments: str, nodes: int, options: str = "", **environment: str
    ) -> int:
        """Submit a job from the checkout. Returns its number."""
        given = [f"--nodes={nodes}", f"--output={self.folder}/job-%j.log", *options.split()]
        words = ["sbatch", "--parsable", "--open-mode=append", *given, script, *arguments]
        return int(self.call(*words, **environment))

    def job(self, number: int) -> dict[str, str]:
        """The fields that `scontrol show job` has: JobState, ExitCode, Restarts, NodeList, ..."""
        shown = self.call("scontrol", "--oneliner", "show", "job", str(number))
        return dict(word.partition("=")[::2] for word in shown.split())

    def said(self, number: int) -> str:
        path = self.folder / f"job-{number}.log"
        return path.read_text() if path.exists() else ""

    def tasks(self) -> list[psutil.Process]:
        """What runs on the nodes, but for Slurm's daemons."""
        found = []
        for node in range(len(self.cluster.nodes)):
            for process in self.cluster.processes(node):
                with suppress(psutil.NoSuchProcess):
                    command = process.cmdline()
                    if command and command[0] not in DAEMONS and "slurmscriptd" not in command[-1]:
                        found.append(process)
        return found

    @property
    def states(self) -> list[str]:
        return self.call("sinfo", "--Node", "--noheader", "--format=%T").split()

    def call(self, *words: str, **environment: str) -> str:
        """Call a command of Slurm on node 0. Returns what it prints."""
        done = self.cluster.run(0, words, {**self.environment, **environment}, CALL_S)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def _start(self, node: int, *words: str) -> None:
        log = self.folder / f"{words[0]}-{node}.log"
        self.cluster.start(node, words, log, self.environment)

    def until(self, reached: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not reached():
            if time.monotonic() > deadline:
                logs = {log.name: log.read_text()[-2000:] for log in self.folder.glob("*-?.log")}
                raise AssertionError(f"{otherwise}: {self.tasks()} {logs}")
            time.sleep(0.1)
