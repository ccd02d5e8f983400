"""Reads the metrics of both sides, and makes the table and the verdict."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from addition.recipe import Recipe
from process import Finished

WARMUP_STEPS = 5  # not timed: allocators, caches and lazy imports settle
ACCURACY_TOLERANCE = 0.05
QUIET_CORES = 0.1  # more than this busy with other programs, and seconds mean little
PHASES = ("generation", "training", "publish", "other")


@dataclass(frozen=True)
class RunResult:
    """The numbers of one side and seed. Seconds are medians over the timed steps."""

    seed: int
    # from the end of one step to the end of the next, evaluation left out
    step: float
    step_mean: float
    # keys PHASES; "other" is what the first three leave of each step
    phases: dict[str, float]
    accuracy: dict[int, float]  # greedy, held out, by step
    reward_first: float  # mean sampled reward of step 1
    seconds: float  # the whole process, start-up included
    peak_bytes: int
    other_cores: float  # cores that other programs kept busy meanwhile


def read_run(metrics: Path, *, seed: int, finished: Finished) -> RunResult:
    """Read either side's metrics.jsonl.

    rlcore's `time/step` ends before metrics are reduced and logged; the difference of two
    `time/from_scratch` does not. TRL's lines have no such clock and `time/step` is already
    everything.
    """
    rows: dict[int, dict[str, float]] = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row["step"], {}).update(row)
    timed = [step for step in sorted(rows) if step > WARMUP_STEPS]
    if not timed:
        raise ValueError(
            f"{metrics} has no step after the first {WARMUP_STEPS}: train more than {WARMUP_STEPS}"
            " steps"
        )
    accuracy = {
        step: row["eval/accuracy"] for step, row in sorted(rows.items()) if "eval/accuracy" in row
    }
    if not accuracy:
        raise ValueError(f"{metrics} has no `eval/accuracy` in any step: was nothing evaluated?")
    periods = [_period(rows[step], rows[step - 1]) for step in timed]
    split = [_phases(rows[step], period) for step, period in zip(timed, periods)]
    phases = {phase: statistics.median(part[phase] for part in split) for phase in PHASES}
    return RunResult(
        seed=seed,
        step=statistics.median(periods),
        step_mean=statistics.fmean(periods),
        phases=phases,
        accuracy=accuracy,
        reward_first=rows[1]["rollout/reward"],
        seconds=finished.seconds,
        peak_bytes=finished.peak_bytes,
        other_cores=finished.other_cores,
    )


def _period(row: dict[str, float], before: dict[str, float]) -> float:
    if "time/from_scratch" in row:
        return (
            row["time/from_scratch"] - before["time/from_scratch"] - row.get("time/evaluation", 0.0)
        )
    return row["time/step"]


def _phases(row: dict[str, float], period: float) -> dict[str, float]:
    named = {phase: row.get(f"time/{phase}", 0.0) for phase in PHASES[:-1]}
    return {**named, "other": period - sum(named.values())}


@dataclass(frozen=True)
class Side:
    """All seeds of one trainer: medians of the runs' medians for seconds, means for accuracy."""

    name: str
    runs: tuple[RunResult, ...]
    recipe: Recipe

    @property
    def step(self) -> float:
        return statistics.median(run.step for run in self.runs)

    @property
    def samples_per_second(self) -> float:
        return self.recipe.samples_per_step / self.step

    def phase(self, name: str) -> float:
        return statistics.median(run.phases[name] for run in self.runs)

    def accuracies(self, step: int) -> list[float]:
        return [run.accuracy[step] for run in self.runs if step in run.accuracy]

    def summary(self) -> dict[str, object]:
        return {
            "step_seconds": self.step,
            "samples_per_second": self.samples_per_second,
            "phase_seconds": {phase: self.phase(phase) for phase in PHASES},
            "accuracy": {
                step: statistics.fmean(found)
                for step in self.recipe.eval_steps
                if (found := self.accuracies(step))
            },
            "runs": [asdict(run) for run in self.runs],
        }


def verdict(ours: Side, theirs: Side) -> dict[str, bool]:
    """Judge speed and accuracy, over the steps that both sides evaluated after the start."""
    steps = [
        step
        for step in ours.recipe.eval_steps
        if step > 0 and ours.accuracies(step) and theirs.accuracies(step)
    ]
    gaps = {
        step: statistics.fmean(ours.accuracies(step)) - statistics.fmean(theirs.accuracies(step))
        for step in steps
    }
    return {
        "not slower": ours.step <= theirs.step,
        **{
            f"accuracy at step {step} within 5 points": abs(gap) <= ACCURACY_TOLERANCE
            for step, gap in gaps.items()
        },
    }


def was_quiet(sides: Sequence[Side]) -> bool:
    """Whether other programs left the machine alone in every run."""
    return all(run.other_cores <= QUIET_CORES for side in sides for run in side.runs)


def table(sides: Sequence[Side]) -> str:
    """Make a Markdown table, one column a side."""
    lines = [["", *(side.name for side in sides)], ["---", *("---:" for _ in sides)]]

    def add(label: str, cells: Sequence[str]) -> None:
        lines.append([label, *cells])

    add("seconds a step", [f"{side.step:.3f}" for side in sides])
    add(
        "  lowest and highest seed",
        [_range([run.step for run in side.runs], "{:.3f}") for side in sides],
    )
    for phase in PHASES:
        add(f"  {phase}", [f"{side.phase(phase):.3f}" for side in sides])
    add("samples/s", [f"{side.samples_per_second:.0f}" for side in sides])
    add(
        "whole run, start-up included, s",
        [f"{statistics.median(r.seconds for r in side.runs):.1f}" for side in sides],
    )
    add(
        "peak memory, MB",
        [f"{max(run.peak_bytes for run in side.runs) / 1e6:.0f}" for side in sides],
    )
    add(
        "cores busy with other programs",
        [f"{max(run.other_cores for run in side.runs):.2f}" for side in sides],
    )
    add(
        "sampled reward at step 1",
        [f"{statistics.fmean(r.reward_first for r in side.runs):.3f}" for side in sides],
    )
    for step in sides[0].recipe.eval_steps:
        if all(side.accuracies(step) for side in sides):
            cells = [
                f"{statistics.fmean(a):.3f} ({_range(a, '{:.3f}')})"
                for a in (s.accuracies(step) for s in sides)
            ]
            add(f"greedy accuracy, step {step}", cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _range(values: Sequence[float], form: str) -> str:
    return f"{form.format(min(values))} to {form.format(max(values))}"


def machine() -> dict[str, object]:
    """Describe the machine."""
    names = {}
    if Path("/proc/cpuinfo").exists():
        pairs = (
            line.split(":", 1)
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if ":" in line
        )
        names = {key.strip(): value.strip() for key, value in pairs}
    return {
        "cpu": names.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
