"""Agents of torchrun on this machine, each as a node, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.integration.held_estimator import held
from tests.integration.rank_runs import InFolder
from tests.integration.workspace import ROOT, Workspace
from tests.ports import free_port
from tests.process_facts import command_of, variable_of

LIMIT_S = 400.0  # for a run to end, on a busy machine
# for a run to get to where something is done to it; agents import everything twice
REACH_S = 300.0


class Launched(InFolder):
    """The agents of a run, one a node."""

    def __init__(
        self, commands: Sequence[tuple[list[str], dict[str, str]]], logs: Path, folder: Path
    ) -> None:
        self.folder = folder
        self.logs = [logs / f"{folder.name}-{node}.log" for node in range(len(commands))]
        self._commands = commands
        self.acted = acted_on(logs, folder)
        self.agents = [self._start(node) for node in range(len(commands))]

    def _start(self, node: int) -> subprocess.Popen[bytes]:
        command, environment = self._commands[node]
        with self.logs[node].open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
            )  # fmt: skip

    def lose(self, node: int) -> None:
        """The agent and its rank are gone without a word."""
        rank = self.rank(node)
        self.agents[node].kill()
        rank.kill()
        self.agents[node].wait(timeout=10)

    def bring_back(self, node: int) -> None:
        self.agents[node] = self._start(node)

    def reach(self, steps: int) -> None:
        """Wait until so many steps are in metrics.jsonl."""
        deadline = time.monotonic() + REACH_S
        metrics = self.folder / "metrics.jsonl"
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def wait(self) -> list[int]:
        deadline = time.monotonic() + LIMIT_S
        return [agent.wait(timeout=max(1.0, deadline - time.monotonic())) for agent in self.agents]

    @property
    def said(self) -> str:
        return "".join(log.read_text() for log in self.logs)

    def rank(self, rank: int) -> psutil.Process:
        return next(p for agent in self.agents for p in psutil.Process(agent.pid).children()
                    if variable_of(p, "RANK") == str(rank))  # fmt: skip

    def go_on(self) -> None:
        """Let a run go on that is held."""
        self.acted.touch()

    def processes(self) -> list[str]:
        """Everything that still runs for this run, agents not counted."""
        agents = {agent.pid for agent in self.agents}
        found = []
        for process in psutil.process_iter():
            command = " ".join(command_of(process))
            if process.pid not in agents and f"run.name={self.folder.name}" in command:
                found.append(command)
        return found

    def kill(self) -> None:
        for agent in self.agents:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)


def acted_on(logs: Path, folder: Path) -> Path:
    """The file for which a run in `folder` waits."""
    return logs / f"{folder.name}.acted"


class Launcher:
    def __init__(self, workspace: Workspace, folder: Path) -> None:
        self.workspace = workspace
        self.folder = folder
        self.launched: list[Launched] = []

    def torchrun(self, name: str, *arguments: str) -> Launched:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
                   "--master-port", str(free_port()), "-m", "rlcore", "train"]  # fmt: skip
        return self._start(name, [(command, {})], arguments)

    def held(self, name: str, *, after: int) -> str:
        """The setting of a run that goes on after so many steps once it is told to, by `go_on`."""
        folder = self.workspace.folder / "runs" / name
        return held(folder, {acted_on(self.folder, folder): after})

    def two_nodes(self, name: str, *arguments: str, restarts: int = 0) -> Launched:
        """By the real script."""
        shared = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                  "GPUS_PER_NODE": "1", "PYTHON": sys.executable,
                  "MAX_RESTARTS": str(restarts)}  # fmt: skip
        script = [str(ROOT / "scripts" / "torchrun_multinode.sh")]
        return self._start(
            name, [(script, {**shared, "NODE_RANK": str(node)}) for node in range(2)], arguments
        )

    def _start(
        self,
        name: str,
        commands: Sequence[tuple[list[str], dict[str, str]]],
        arguments: Sequence[str],
    ) -> Launched:
        given = [str(self.workspace.base), f"run.name={name}", *arguments]
        whole = [([*command, *given], environment) for command, environment in commands]
        self.launched.append(Launched(whole, self.folder, self.workspace.folder / "runs" / name))
        return self.launched[-1]

    def close(self) -> None:
        """Nothing of it goes on."""
        for launched in self.launched:
            launched.kill()
