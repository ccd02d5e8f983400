"""Reads the results of a run of `launchers.py`, and makes the table and the list of faults."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from launching.programs import REPOSITORY, SHARED
from launching.ways import RLCORE
from process import ProgramFailedError

from rlcore.runs.metrics import read_metrics
from rlcore.runs.versions import read_versions

GAP = "rollout/train_rollout_logprob_diff"
WINDOW = 10  # steps of one mean reward
AUDIT_S = 300
COLUMNS = (
    "launcher",
    "engine",
    "seed",
    "accuracy before",
    "after",
    f"mean reward, each {WINDOW} steps",
    "log-prob gap",
    "versions",
    "ledger",
    "seconds",
)


@dataclass(frozen=True)
class Learned:
    """One run."""

    launcher: str
    engine: str
    seed: int
    before: float  # greedy accuracy, held out
    after: float
    rewards: list[float]  # mean over each WINDOW steps
    # |log-prob of the engine - of the trainer|, mean over a step's tokens: the largest
    gap: float
    versions: int  # publications
    in_order: bool  # versions count up by one, each of the next step
    balanced: bool  # the ledger, with versions and recorded samples
    seconds: float  # of the whole run, start-up included

    def cells(self) -> list[str]:
        return [
            self.launcher,
            self.engine,
            str(self.seed),
            f"{100 * self.before:.1f} %",
            f"{100 * self.after:.1f} %",
            ", ".join(f"{reward:.3f}" for reward in self.rewards),
            f"{self.gap:.0e}",
            f"1 to {self.versions}" if self.in_order else "OUT OF ORDER",
            "balanced" if self.balanced else "NOT BALANCED",
            f"{self.seconds:.0f}",
        ]


def read(launcher: str, engine: str, seed: int, folder: Path, seconds: float) -> Learned:
    rows = read_metrics(folder / "metrics.jsonl")
    versions = read_versions(folder / "versions.jsonl")
    accuracies, rewards, gaps = (
        [row[name] for row in rows if name in row]
        for name in ("eval/accuracy", "rollout/reward", GAP)
    )
    return Learned(
        launcher,
        engine,
        seed,
        before=accuracies[0],
        after=accuracies[-1],
        rewards=[
            statistics.fmean(rewards[start : start + WINDOW])
            for start in range(0, len(rewards), WINDOW)
        ],
        gap=max(gaps),
        versions=len(versions),
        in_order=[(one.version, one.step) for one in versions]
        == [(step + 1, step) for step in range(len(versions))],
        balanced=ledger_balances(folder),
        seconds=seconds,
    )


def ledger_balances(folder: Path) -> bool:
    """Check the ledger by `rlcore ledger`, with versions and recorded samples."""
    asked = subprocess.run(
        [*RLCORE, "ledger", str(folder), "--json"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, **SHARED},
        timeout=AUDIT_S,
    )
    if asked.returncode not in (0, 1):
        raise ProgramFailedError(
            f"`rlcore ledger {folder}` ended with exit code"
            f" {asked.returncode}:\n{asked.stderr[-2000:]}"
        )
    return bool(json.loads(asked.stdout)["balanced"])


def line(cells: Sequence[str]) -> str:
    """Make a row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def spread(runs: Sequence[Learned]) -> str:
    """The range of accuracies over seeds."""
    after = [100 * run.after for run in runs]
    ends = f"{min(after):.1f} to {max(after):.1f} %, mean {statistics.fmean(after):.1f} %"
    return f"{len(after)} seeds of the {runs[0].engine} engine: {ends}"


def faults(runs: Sequence[Learned], band: tuple[float, float] | None) -> Iterator[str]:
    """Describe what is wrong. `band` is the range of a good final accuracy; None accepts any."""
    for run in runs:
        who = f"{run.launcher}, {run.engine}, seed {run.seed}"
        if not run.balanced:
            yield f"{who}: the ledger does not balance"
        if not run.in_order:
            yield f"{who}: versions are out of order"
        if band is not None and not band[0] <= run.after <= band[1]:
            yield (
                f"{who}: an accuracy of {run.after:.3f} lies outside {band[0]:g} to {band[1]:g}"
                " (--band)"
            )
