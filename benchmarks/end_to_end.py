"""Measures seconds a GRPO step and accuracy beside TRL's GRPOTrainer, on the same data and machine.

    python benchmarks/end_to_end.py             # five seeds of 40 steps, both sides, alternating
    python benchmarks/end_to_end.py --quick     # one seed of 10 steps: does it work?

It makes TRL's environment, the addition problems and a warmed-up model, then trains both sides
from that Hugging Face folder with two threads each, one after the other; the first one changes
with every seed. Writes `result.json` and `result.md` under --work. Exit code 1: rlcore is slower,
or mean accuracies lie more than 5 points apart; 2: a run failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from addition import ours, trl_environment
from addition.recipe import RECIPE, TRL_LOSS_TYPES
from process import Finished, code_of, run
from report import RunResult, Side, machine, read_run, table, verdict, was_quiet

HERE = Path(__file__).resolve().parent
EVALUATION_TOLERANCE = 0.005  # two of 500 problems may turn on round-off
TRL = f"TRL {trl_environment.TRL_VERSION}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1 to this number")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed of 10 steps; the verdict is shown, not enforced",
    )
    parser.add_argument("--only", choices=["rlcore", "trl"], help="run one side alone; no verdict")
    parser.add_argument("--aggregation", choices=sorted(TRL_LOSS_TYPES), default="token-mean")
    parser.add_argument(
        "--model", type=Path, help="a warmed-up Hugging Face folder, instead of making one"
    )
    parser.add_argument("--work", type=Path, default=ours.REPOSITORY / "runs" / "benchmark")
    parser.add_argument("--trl-environment", type=Path, default=ours.REPOSITORY / ".venv-trl")
    parser.add_argument(
        "--deadline", type=float, default=900.0, help="seconds that one training run may take"
    )
    options = parser.parse_args()
    if options.quick:
        options.seeds = 1
        options.steps = 10
    options.work = options.work.resolve()
    return options


def train(
    side: str, seed: int, options: argparse.Namespace, model: Path, trl_python: Path | None
) -> RunResult:
    """Run one side with one seed."""
    output = options.work / f"{side}-seed{seed}"
    data = options.work / "data"
    if side == "rlcore":
        finished = ours.train(
            model, data, output,
            seed=seed, steps=options.steps, threads=options.threads,
            aggregation=options.aggregation, deadline_s=options.deadline,
        )  # fmt: skip
        rescored = ours.rescore(output, data, threads=options.threads)
    else:
        assert trl_python is not None
        finished = train_trl(trl_python, model, data, output, seed, options)
        rescored = None
    result = read_run(output / "metrics.jsonl", seed=seed, finished=finished)
    if (
        rescored is not None
        and abs(rescored - result.accuracy[options.steps]) > EVALUATION_TOLERANCE
    ):
        raise SystemExit(
            f"{output}: rlcore's last eval/accuracy is {result.accuracy[options.steps]}, but the"
            f" model that it exported scores {rescored} by greedy.py: the two evaluations do not"
            " measure the same thing"
        )
    accuracy = ", ".join(f"{value:.3f} at {step}" for step, value in result.accuracy.items())
    print(
        f"seed {seed} {side:>6}: {result.step:.3f} s a step, accuracy {accuracy}; "
        f"other programs had {result.other_cores:.2f} cores",
        flush=True,
    )
    return result


def train_trl(
    python: Path, model: Path, data: Path, output: Path, seed: int, options: argparse.Namespace
) -> Finished:
    arguments = {
        "--seed": seed,
        "--steps": options.steps,
        "--lr": RECIPE.learning_rate,
        "--threads": options.threads,
        "--aggregation": options.aggregation,
    }
    flat = [str(word) for pair in arguments.items() for word in pair]
    command = [*map(str, (python, HERE / "addition" / "trl_grpo.py", model, data, output)), *flat]
    return run(
        command,
        log=output.with_suffix(".log"),
        threads=options.threads,
        deadline_s=options.deadline,
    )


def main() -> int:
    options = parse_arguments()
    names = [options.only] if options.only else ["rlcore", "trl"]
    trl_python = (
        trl_environment.ensure(options.trl_environment, options.work / "trl-install.log")
        if "trl" in names
        else None
    )
    ours.make_data(options.work)
    model = options.model.resolve() if options.model else warmed_up(options)

    runs: dict[str, list[RunResult]] = {name: [] for name in names}
    for seed in range(1, options.seeds + 1):
        for name in names if seed % 2 else reversed(names):
            runs[name].append(train(name, seed, options, model, trl_python))

    sides = [Side("rlcore" if name == "rlcore" else TRL, tuple(runs[name])) for name in names]
    checks = verdict(*sides) if len(sides) == 2 else {}
    write_report(options, sides, checks)
    return 0 if options.quick or all(checks.values()) else 1


def warmed_up(options: argparse.Namespace) -> Path:
    print("warming up the model", flush=True)
    return ours.warm_up(options.work, threads=options.threads)


def write_report(options: argparse.Namespace, sides: list[Side], checks: dict[str, bool]) -> None:
    where = machine()
    versions = {name: version(name) for name in ("torch", "transformers", "megatron-core")}
    versions["trl"] = trl_environment.TRL_VERSION
    result = {
        "machine": where,
        "versions": versions,
        "threads": options.threads,
        "steps": options.steps,
        "aggregation": options.aggregation,
        "recipe": asdict(RECIPE),
        "sides": {side.name: side.summary() for side in sides},
        "verdict": checks,
    }
    (options.work / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    title = (
        f"{where['cpu']}, {options.threads} threads of {where['cores']} cores, {where['memory_gb']}"
        f" GB, torch {versions['torch']}; {options.steps} steps of {RECIPE.prompts_per_step} x"
        f" {RECIPE.samples_per_prompt} samples, {len(sides[0].runs)} seeds"
    )
    lines = [
        title,
        "",
        table(sides),
        "",
        *(f"- {name}: {'yes' if holds else 'NO'}" for name, holds in checks.items()),
    ]
    if not was_quiet(sides):
        lines += [
            "",
            (
                "**Other programs were busy on this machine meanwhile: the seconds are not to be"
                " trusted.**"
            ),
        ]
    text = "\n".join(lines) + "\n"
    (options.work / "result.md").write_text(text)
    print("\n" + text)


if __name__ == "__main__":
    sys.exit(code_of(main))
