"""The tests' side of rank_driver.py: runs with several ranks, and signals to them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil

from rlcore.runs.metrics import read_metrics
from tests.fork_server import ForkServer
from tests.integration.held_estimator import held
from tests.process_facts import command_of

HERE = Path(__file__).resolve().parent
REACH_S = 300.0  # for a run to get to where something is done to it, on a busy machine


class InFolder:
    """The files that a run leaves in its folder."""

    folder: Path

    @property
    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "result.json").read_bytes())
        return content

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")


@dataclass(frozen=True)
class Ended(InFolder):
    """The end of a run with several ranks."""

    code: int
    said: str  # on the terminal, by all ranks
    folder: Path
    seconds: float  # from what was done to it, else from its start
    orphans: list[str]

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / f"rank_{rank}.log").read_text()

    def lines(self, text: str) -> list[str]:
        return [line for line in self.said.splitlines() if text in line]


@dataclass(frozen=True)
class Going:
    """The processes of a live run."""

    supervisor: int
    ranks: list[int]

    def child(self, word: str) -> psutil.Process:
        """Return the process below rank 0 with `word` in its command line."""
        below = psutil.Process(self.ranks[0]).children(recursive=True)
        return next(
            process for process in below if any(word in part for part in command_of(process))
        )


Act = Callable[[Going], object]


def to_rank(rank: int, number: signal.Signals) -> Act:
    return lambda going: os.kill(going.ranks[rank], number)


def to_child(word: str, number: signal.Signals) -> Act:
    return lambda going: going.child(word).send_signal(number)


class RankRuns:
    """Runs `rlcore train` with several ranks, forked from a process that has imported all."""

    def __init__(self, folder: Path, base: Path, runs: Path) -> None:
        self.folder = folder
        self.base = base
        self.runs = runs
        self._count = 0
        folders = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH")]
        python_path = os.pathsep.join(filter(None, folders))
        environment = {**os.environ, "PYTHONPATH": python_path}
        self._driver = ForkServer(HERE / "rank_driver.py", environment)

    def train(
        self,
        name: str,
        *arguments: str,
        ranks: int = 2,
        act: Act | None = None,
        after_steps: int = 2,
        held_after: int | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Ended:
        """Run to the end, and do `act` once `after_steps` steps are in metrics.jsonl.

        With `held_after` the run waits for `act` once it has logged so many steps, however late the
        machine lets `act` come. `environment` is added to this process's own.
        """
        self._count += 1
        log = self.folder / f"{self._count}.log"
        folder = self.runs / name
        is_repeated = {"--resume", "--overwrite"} & {*arguments}
        assert is_repeated or not folder.exists(), f"another test has a run {name}"
        given = [
            "train",
            str(self.base),
            f"run.name={name}",
            f"cluster.processes_per_node={ranks}",
            *arguments,
        ]
        acted = self.folder / f"{self._count}.acted"
        if held_after is not None:
            given.append(held(folder, {acted: held_after}))
        began = time.monotonic()
        self._driver.send(
            {"arguments": given, "ranks": ranks, "log": str(log), "environment": {**environment}}
        )
        try:
            if act is not None:
                self._reach(folder / "metrics.jsonl", after_steps, log)
                supervisor, *pids = json.loads(Path(f"{log}.pids").read_text())
                began = time.monotonic()
                act(Going(supervisor, pids))
                acted.touch()
        finally:
            # also where `act` fails: the next answer is the next run's
            answer = self._driver.answer()
        orphans_s = answer["orphans_seconds"]
        return Ended(
            answer["code"],
            log.read_text(),
            folder,
            time.monotonic() - began - orphans_s,
            answer["orphans"],
        )

    def close(self) -> None:
        self._driver.close()

    def _reach(self, metrics: Path, steps: int, log: Path) -> None:
        deadline = time.monotonic() + REACH_S
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < steps:
            assert time.monotonic() < deadline, f"no step {steps} in {REACH_S} s: {log.read_text()}"
            time.sleep(0.02)
