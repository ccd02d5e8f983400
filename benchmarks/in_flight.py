"""Thousands of conversations in flight beside a trainer: memory, CPU a token, the trainer's step.

    python benchmarks/in_flight.py                     # 4096 conversations for ten minutes
    python benchmarks/in_flight.py --service in_process   # the rollouts in threads of rank 0
    python benchmarks/in_flight.py --steps 4 --prompts 4 --turn-s 0.5

A real run of `rlcore train`: the calculator's environment, 8 samples a prompt, `max_staleness` 15,
ledger, recordings and index, with an engine that has no model and takes a set time for each turn.
Then the last recorded step is trained again, several times, with no rollouts beside it. Printed are
the curve of resident memory, seconds of the rollouts' thread a token, and the trainer's seconds of
both runs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from process import code_of, run

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "calculator"
SAMPLES = 8
LIMIT_S = 7200.0
TRAINER = ("transfer", "advantages", "training")
RLCORE = Path(sys.executable).with_name("rlcore")


def settings(arguments: argparse.Namespace, folder: Path) -> list[str]:
    return [
        f"model.path={folder / 'model'}",
        "model.dtype=fp32",
        f"run.dir={folder / 'runs'}",
        "run.threads=1",
        f"data.paths={folder / 'data' / 'train.jsonl'}",
        "data.as_chat=true",
        "policy.max_tokens_per_microbatch=4096",
        "algorithm.estimator.name=reinforce++",
        "rollout.workflow={name: env, env: 'calculator:Calculator', max_turns: 8}",
        f"rollout.prompts_per_step={arguments.prompts}",
        f"rollout.samples_per_prompt={SAMPLES}",
        f"rollout.max_staleness={arguments.staleness}",
        "rollout.sampling.max_new_tokens=96",
        "rollout.engine.kind=workers.timed_engine:TimedEngine",
        f"rollout.engine.server={{turns: {arguments.turns}, turn_s: {arguments.turn_s}}}",
        f"rollout.service={arguments.service}",
        "rollout.engine.max_in_flight=8192",
        "rollout.engine.max_logprob_diff=100",  # the engine has no model
        "reward.parts={right: {source: workflow}}",
        "checkpoint.every=0",
        "checkpoint.export_hf=false",
    ]


def trainer_seconds(folder: Path) -> dict[str, float]:
    """Return the median seconds of the trainer's phases; the first two steps warm up."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][2:]
    return {
        phase: statistics.median(row[f"time/{phase}"] for row in rows)
        for phase in TRAINER
        if f"time/{phase}" in rows[0]
    }


def measure(arguments: argparse.Namespace, folder: Path) -> int:
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks", EXAMPLE)))
    os.environ["LOAD_FILE"] = str(folder / "load.jsonl")
    log = folder / "log"
    limits: dict[str, Any] = {"log": log, "threads": 1, "deadline_s": LIMIT_S}
    run([sys.executable, EXAMPLE / "make_data.py", folder / "data"], **limits)
    run([RLCORE, "init-model", folder / "model", "--preset", "ascii", "--chat"], **limits)
    given = settings(arguments, folder)
    train = [RLCORE, "train", *given]
    run([*train, "run.name=loaded", f"training.steps={arguments.steps}"], **limits)
    loaded = folder / "runs" / "loaded"
    recorded = loaded / "rollouts" / f"step_{arguments.steps:06d}.parquet"
    again = ["training.debug=train_only", f"training.replay={recorded}", "training.steps=7"]
    run([*train, "run.name=alone", *again], **limits)
    return report(
        [json.loads(line) for line in (folder / "load.jsonl").read_text().splitlines()],
        trainer_seconds(loaded),
        trainer_seconds(folder / "runs" / "alone"),
    )


def report(
    looks: Sequence[dict[str, float]], beside: dict[str, float], alone: dict[str, float]
) -> int:
    began = looks[0]["at"]
    print("minute  in flight  resident MB  threads")
    for look in looks[:: max(len(looks) // 12, 1)]:
        print(
            f"{(look['at'] - began) / 60:6.1f}  {look['in_flight']:9.0f}"
            f"  {look['resident'] / 1e6:11.0f}  {look['threads']:7.0f}"
        )
    quarter = len(looks) // 4
    early = statistics.median(look["resident"] for look in looks[quarter : 2 * quarter])
    late = statistics.median(look["resident"] for look in looks[-quarter:])
    print(f"memory of the last quarter over that of the second: {late / early:.3f}")
    first, last = looks[0], looks[-1]
    seconds = last["thread_s"] - first["thread_s"]
    tokens = last["tokens"] - first["tokens"]
    print(
        f"{tokens / 1e6:.2f} M tokens in {(last['at'] - began) / 60:.1f} minutes; the rollouts'"
        f" thread computes {seconds / tokens * 1e6:.1f} us a token,"
        f" {100 * seconds / (last['at'] - began):.0f} % of a core"
    )
    for phase, value in beside.items():
        print(
            f"time/{phase}: {value:.2f} s beside rollouts, {alone[phase]:.2f} s alone"
            f" ({value / alone[phase]:.2f} times)"
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32, help="of a step, with 8 samples each")
    parser.add_argument("--staleness", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--service", default="process", help="process or in_process")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--turn-s", type=float, default=40.0, help="seconds of a turn, on average")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return measure(arguments, Path(folder))


if __name__ == "__main__":
    sys.exit(code_of(main))
