"""Measures seconds a GRPO step and accuracy beside TRL's GRPOTrainer, on the same data and machine.

    python benchmarks/end_to_end.py                   # five seeds of 40 steps, alternating sides
    python benchmarks/end_to_end.py --quick           # one seed of 10 steps: does it work?
    python benchmarks/end_to_end.py --model smollm2   # SmolLM2-135M: five seeds of 10 steps

It makes TRL's environment, the addition problems and a model, a tiny one that is warmed up or
SmolLM2, then trains both sides from that Hugging Face folder with two threads each, one after the
other; the first one changes with every seed. Writes `result.json` and `result.md` under --work.
Exit code 1: rlcore is slower, or mean accuracies lie more than 5 points apart; 2: a run failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from addition import ours, trl_environment
from addition.recipe import RECIPES, TRL_LOSS_TYPES
from process import Finished, code_of, run
from report import RunResult, Side, machine, read_run, table, verdict, was_quiet

HERE = Path(__file__).resolve().parent
TURNED_BY_ROUNDING = 2.5  # held-out problems
TRL = f"TRL {trl_environment.TRL_VERSION}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="seeds 1 to this number")
    parser.add_argument("--steps", type=int, help="default: the last that is evaluated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one seed of 10 steps; the verdict is shown, not enforced",
    )
    parser.add_argument("--only", choices=["rlcore", "trl"], help="run one side alone; no verdict")
    parser.add_argument("--aggregation", choices=sorted(TRL_LOSS_TYPES), default="token-mean")
    parser.add_argument("--model", choices=RECIPES, default="toy")
    parser.add_argument(
        "--folder", type=Path, help="its Hugging Face folder, instead of making one"
    )
    parser.add_argument("--work", type=Path, default=ours.REPOSITORY / "runs" / "benchmark")
    parser.add_argument("--trl-environment", type=Path, default=ours.REPOSITORY / ".venv-trl")
    parser.add_argument(
        "--deadline", type=float, default=900.0, help="seconds that one training run may take"
    )
    options = parser.parse_args()
    options.recipe = RECIPES[options.model]
    options.steps = options.steps or options.recipe.eval_steps[-1]
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
            recipe=options.recipe, seed=seed, steps=options.steps, threads=options.threads,
            aggregation=options.aggregation, deadline_s=options.deadline,
        )  # fmt: skip
        rescored = ours.rescore(output, data, options.recipe, threads=options.threads)
    else:
        assert trl_python is not None
        finished = train_trl(trl_python, model, data, output, seed, options)
        rescored = None
    result = read_run(output / "metrics.jsonl", seed=seed, finished=finished)
    if (
        rescored is not None
        and abs(rescored - result.accuracy[options.steps])
        > TURNED_BY_ROUNDING / options.recipe.heldout
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
        "--recipe": options.model,
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
    ours.make_data(options.work, options.recipe)
    model = options.folder.resolve() if options.folder else make_model(options)

    runs: dict[str, list[RunResult]] = {name: [] for name in names}
    for seed in range(1, options.seeds + 1):
        for name in names if seed % 2 else reversed(names):
            runs[name].append(train(name, seed, options, model, trl_python))

    titles = {"rlcore": "rlcore", "trl": TRL}
    sides = [Side(titles[name], tuple(runs[name]), options.recipe) for name in names]
    checks = verdict(*sides) if len(sides) == 2 else {}
    write_report(options, sides, checks)
    return 0 if options.quick or all(checks.values()) else 1


def make_model(options: argparse.Namespace) -> Path:
    if options.model == "smollm2":
        return ours.smollm2(options.work)
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
        "recipe": asdict(options.recipe),
        "sides": {side.name: side.summary() for side in sides},
        "verdict": checks,
    }
    (options.work / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    title = (
        f"{where['cpu']}, {options.threads} threads of {where['cores']} cores, {where['memory_gb']}"
        f" GB, torch {versions['torch']}; {options.steps} steps of"
        f" {options.recipe.prompts_per_step} x {options.recipe.samples_per_prompt} samples,"
        f" {len(sides[0].runs)} seeds"
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
