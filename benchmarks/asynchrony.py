"""Measures seconds to an accuracy, in lock-step and ahead of training.

The addition example, GRPO from one warmed-up model, with an engine whose answers come late: by a
time that is log-normal, the same for a draw of a prompt in every run (`long_tails.py`). Nearly all
time is spent in waiting for them, so what is compared is the order of things and not the machine.
The clock begins with the first weights and counts all that follows, evaluations included. Exit code
1: a token was older than its bound or a ledger does not balance; or, of lock-step and of what clips
against the engine's log-probs, a run did not reach the level, or `max_staleness` 2 was not faster
to it than 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from addition import ours
from report import machine
from simulation.long_tails import log_normal, long_tailed

from rlcore import cli
from rlcore.runs.directory import RunDirectory
from rlcore.runs.metrics import read_metrics
from rollout.accounting.audit import audit

# How the loss treats tokens of older weights. `rollout`: PPO's ratio, and its clip, are against the
# engine's log-probs.
LOSSES = {
    "as if they were new": (),
    "tis": ("algorithm.correction={name: tis}",),
    "rollout": ("algorithm.old_logprobs=rollout",),
}
UNAWARE, TIS, ROLLOUT = LOSSES
COLUMNS = (
    "k",
    "old tokens",
    "seconds to the level",
    "steps to it",
    "seconds in all",
    "accuracy at the end",
    "staleness, mean",
    "max",
    "trainer idle",
    "ledger",
)


@dataclass(frozen=True)
class Outcome:
    """One run. `reached`: seconds and steps to the accuracy; None if it was never reached."""

    seed: int
    reached: tuple[float, int] | None
    seconds: float
    accuracy: list[float]  # held out, greedy, at each evaluation
    staleness_mean: float
    staleness_max: int
    trainer_idle: float  # share
    balanced: bool


@dataclass(frozen=True)
class Case:
    """`rollout.max_staleness`, and one of `LOSSES`."""

    staleness: int
    loss: str

    def __str__(self) -> str:
        return f"k{self.staleness}-{self.loss.replace(' ', '_')}"


LOCK_STEP = Case(0, UNAWARE)
CASES = (LOCK_STEP, Case(1, ROLLOUT), Case(2, ROLLOUT), Case(2, TIS), Case(2, UNAWARE))
GOALS = CASES[:3]  # must reach the level


def train(case: Case, seed: int, options: argparse.Namespace, *, steps: int) -> Path:
    """Run in this process, and return the run's folder. Raises SystemExit if the run fails."""
    name = f"{case}-seed{seed}"
    arguments = [
        "train",
        str(ours.EXAMPLE / "base.yaml"),
        str(ours.EXAMPLE / "grpo.yaml"),
        "--overwrite",
        f"run.name={name}",
        f"run.dir={options.work}",
        f"run.seed={seed}",
        "run.threads=1",
        f"model.path={options.model}",
        f"data.paths={options.work / 'data' / 'train.jsonl'}",
        f"evaluation.paths=[{options.work / 'data' / 'heldout.jsonl'}]",
        "evaluation.max_prompts=256",
        f"evaluation.every={options.every}",
        f"training.steps={steps}",
        "checkpoint.every=0",
        "checkpoint.export_hf=false",
        "tracking.show_samples=0",
        f"rollout.max_staleness={case.staleness}",
        "rollout.on_update=in_place",
        *LOSSES[case.loss],
    ]
    log = options.work / f"{name}.log"
    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        code = cli.main(arguments)
    if code:
        raise SystemExit(f"{name} ended with exit code {code}; see {log}")
    return Path(options.work / name)


def outcome(folder: Path, seed: int, level: float) -> Outcome:
    """Read the result of a run from its folder."""
    rows = read_metrics(folder / "metrics.jsonl")
    began = rows[0]["time/from_scratch"] - rows[0]["time/evaluation"]
    evaluated = [row for row in rows if "eval/accuracy" in row]
    enough = [row for row in evaluated if row["eval/accuracy"] >= level]
    reached = (enough[0]["time/from_scratch"] - began, enough[0]["step"]) if enough else None
    steps = [row for row in rows if row["step"] > 0]
    found = audit(RunDirectory(folder))
    return Outcome(
        seed,
        reached,
        rows[-1]["time/from_scratch"] - began,
        [row["eval/accuracy"] for row in evaluated],
        statistics.fmean(row["rollout/staleness_mean"] for row in steps),
        int(max(row["rollout/staleness_max"] for row in steps)),
        statistics.fmean(row["perf/trainer_idle_fraction"] for row in steps),
        found.contradictions == [] and found.recorded == len(steps),
    )


def row(case: Case, runs: list[Outcome]) -> str:
    def spread(values: list[float], places: int) -> str:
        mean = statistics.fmean(values)
        low = min(values)
        high = max(values)
        return f"{mean:.{places}f} ({low:.{places}f} to {high:.{places}f})"

    reached = [run.reached for run in runs if run.reached is not None]
    missed = f", {len(runs) - len(reached)} never" if len(reached) < len(runs) else ""
    cells = [
        str(case.staleness),
        case.loss if case.staleness else "there are none",
        (spread([seconds for seconds, _ in reached], 1) if reached else "-") + missed,
        spread([float(step) for _, step in reached], 0) if reached else "-",
        f"{statistics.fmean(run.seconds for run in runs):.1f}",
        spread([run.accuracy[-1] for run in runs], 3),
        f"{statistics.fmean(run.staleness_mean for run in runs):.2f}",
        str(max(run.staleness_max for run in runs)),
        f"{statistics.fmean(run.trainer_idle for run in runs):.2f}",
        "balanced" if all(run.balanced for run in runs) else "DOES NOT BALANCE",
    ]
    return "| " + " | ".join(cells) + " |"


def verdict(found: dict[Case, list[Outcome]]) -> list[str]:
    """List the violations of `max_staleness`; empty if there are none."""
    wrong = [
        f"{case}, seed {run.seed}: the ledger does not balance"
        for case, runs in found.items()
        for run in runs
        if not run.balanced
    ]
    wrong += [
        f"{case}, seed {run.seed}: staleness {run.staleness_max}"
        for case, runs in found.items()
        for run in runs
        if run.staleness_max > case.staleness
    ]
    wrong += [
        f"{case}, seed {run.seed}: the level was never reached"
        for case in GOALS
        for run in found[case]
        if run.reached is None
    ]
    seconds = {
        case: statistics.fmean(
            run.reached[0] if run.reached else run.seconds for run in found[case]
        )
        for case in GOALS
    }
    slower = [case for case in GOALS if case.staleness == 2 and seconds[case] >= seconds[LOCK_STEP]]
    return wrong + [f"{case} was not faster than lock-step" for case in slower]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this number")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--every", type=int, default=2, help="steps between evaluations")
    parser.add_argument("--level", type=float, default=0.75, help="of held-out accuracy")
    parser.add_argument(
        "--median", type=float, default=0.2, help="seconds; the tail is cut at ten times that"
    )
    parser.add_argument(
        "--model", type=Path, help="a warmed-up Hugging Face folder, instead of making one"
    )
    parser.add_argument("--work", type=Path, default=ours.REPOSITORY / "runs" / "asynchrony")
    options = parser.parse_args()
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    ours.make_data(options.work)
    options.model = (
        options.model.resolve() if options.model else ours.warm_up(options.work, threads=2)
    )

    found: dict[Case, list[Outcome]] = {case: [] for case in CASES}
    with long_tailed(log_normal(options.median)):
        train(LOCK_STEP, 0, options, steps=1)  # imports, caches
        for seed in range(1, options.seeds + 1):
            for case in CASES:
                found[case].append(
                    outcome(train(case, seed, options, steps=options.steps), seed, options.level)
                )
                print(f"{case} seed {seed}: {found[case][-1]}", file=sys.stderr, flush=True)
    where = machine()
    print(f"{where['cpu']}; level {options.level}, {options.steps} steps, {options.seeds} seeds\n")
    print("| " + " | ".join(COLUMNS) + " |\n|---:|---|" + "---:|" * (len(COLUMNS) - 3) + "---|")
    for case, runs in found.items():
        print(row(case, runs))
    report = {
        "machine": where,
        "cases": {str(case): [asdict(run) for run in runs] for case, runs in found.items()},
    }
    (options.work / "asynchrony.json").write_text(json.dumps(report, indent=2) + "\n")
    wrong = verdict(found)
    print("\n" + "\n".join(wrong or ["nothing against it"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
