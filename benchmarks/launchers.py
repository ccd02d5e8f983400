"""Runs the addition example under every launcher, on CPU SGLang, and compares what is learned.

    python benchmarks/launchers.py                          # three seeds, then each launcher
    python benchmarks/launchers.py --only ray,ray-nodes     # some launchers; --seeds 0: no seeds
    python benchmarks/launchers.py --quick                  # 3 steps, one seed: does it work?

The seeds run on the embedded engine. Each run is the quickstart's second half (GRPO, 40 steps, two
tensor-parallel ranks, one engine), from one warmed-up Hugging Face folder, one after the other. The
script prints a Markdown table, a row as soon as its run has ended, and writes it to `launchers.md`
under --work. Exit code 1: a ledger does not balance,
versions are out of order, or a final accuracy lies outside --band; 2: a run failed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from addition import ours
from launching.programs import REPOSITORY, run_together
from launching.results import COLUMNS, Learned, faults, line, read, spread
from launching.ways import START_S, WAYS, Task
from process import code_of
from report import machine

STEPS = 40
QUICK_STEPS = 3
BAND = (0.80, 0.92)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default=",".join(WAYS), help=f"launchers on SGLang, by commas: {', '.join(WAYS)}"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        help="of the embedded engine under the local launcher, from 1 on",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_STEPS} steps, one seed; accuracies are not judged",
    )
    parser.add_argument(
        "--band",
        type=float,
        nargs=2,
        default=BAND,
        metavar=("LOW", "HIGH"),
        help="of the final accuracy",
    )
    parser.add_argument(
        "--model", type=Path, help="a warmed-up Hugging Face folder, instead of making one"
    )
    parser.add_argument("--work", type=Path, default=REPOSITORY / "runs" / "launchers")
    parser.add_argument(
        "--deadline", type=float, default=1800.0, help="seconds that one run may take"
    )
    options = parser.parse_args()
    options.only = [name for name in options.only.split(",") if name]
    if unknown := sorted(set(options.only) - set(WAYS)):
        parser.error(f"--only: {', '.join(unknown)} is unknown; there are {', '.join(WAYS)}")
    if options.quick:
        options.seeds = min(options.seeds, 1)
    options.work = options.work.resolve()
    return options


def all_runs(model: Path, options: argparse.Namespace) -> Iterator[Learned]:
    """Run the embedded engine's seeds, then every launcher, one after the other."""
    for seed in range(1, options.seeds + 1):
        yield train("local", "embedded", seed, model, options)
    for way in options.only:
        yield train(way, "sglang", 1, model, options)


def train(way: str, engine: str, seed: int, model: Path, options: argparse.Namespace) -> Learned:
    name = f"{way}-{engine}-seed{seed}"
    data = options.work / "data"
    overrides = {
        "run.dir": options.work,
        "run.seed": seed,
        "model.path": model,
        "policy.parallel.tensor": 2,
        "data.paths": data / "train.jsonl",
        "evaluation.paths": f"[{data / 'heldout.jsonl'}]",
        "training.steps": QUICK_STEPS if options.quick else STEPS,
        "cluster.start_timeout_s": START_S,
    }
    label, programs = WAYS[way]
    # paths of sockets must be short
    with TemporaryDirectory(prefix="rl", dir="/tmp") as scratch:
        given = programs(Task(name, engine, overrides, Path(scratch)))
        seconds = run_together(
            given, options.work / "terminals" / name, deadline_s=options.deadline
        )
    return read(label, engine, seed, options.work / name, seconds)


def main() -> int:
    options = parse_arguments()
    ours.make_data(options.work)
    model = options.model.resolve() if options.model else ours.warm_up(options.work, threads=2)
    where = machine()
    written = options.work / "launchers.md"
    written.write_text("")

    def say(text: str) -> None:
        print(text, flush=True)
        with written.open("a") as file:
            file.write(text + "\n")

    say(f"{where['cpu']}, {where['cores']} cores, {where['memory_gb']} GB\n")
    say(line(COLUMNS) + "\n" + line(["---"] * len(COLUMNS)))
    runs = []
    for run in all_runs(model, options):
        runs.append(run)
        say(line(run.cells()))
    if options.seeds:
        say("\n" + spread(runs[: options.seeds]))
    found = list(faults(runs, None if options.quick else options.band))
    say("\n" + "\n".join(f"- {fault}" for fault in found or ["no fault"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(code_of(main))
