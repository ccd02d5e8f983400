"""The end of an example's script, below the run's own table: held-out accuracy, answers before and
after, the reward curve, and what was left behind.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from plot import plot_run

from rlcore.runs.metrics import read_metrics
from rlcore.runs.rollouts import read_rollouts
from rlcore.tracking.format import curve


def print_answers(run: Path, count: int) -> None:
    """Print held-out problems with their greedy answers of the first and the last evaluation."""
    files = sorted((run / "evaluations").glob("*.parquet"))
    before, after = (
        {record["prompt_text"]: record for record in read_rollouts(path)}
        for path in (files[0], files[-1])
    )
    for prompt in list(before)[:count]:
        # The problem is at the end of what a chat template makes of it.
        print(f"  ... {' '.join(prompt.split())[-80:]}  label {before[prompt]['label']}")
        print(f"     before: {before[prompt]['response_text']!r}")
        print(f"     after:  {after[prompt]['response_text']!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--started",
        type=float,
        required=True,
        help="when the script began, seconds since the epoch",
    )
    parser.add_argument("--title", default="GRPO on addition, 2 tensor-parallel ranks")
    parser.add_argument("--answers", type=int, default=0, help="held-out answers to print")
    arguments = parser.parse_args()
    run: Path = arguments.run
    rows = read_metrics(run / "metrics.jsonl")
    accuracies = curve(rows, ("eval/accuracy",))[1]
    picture = plot_run(run / "metrics.jsonl", run / "curve.png", title=arguments.title)
    seconds = time.time() - arguments.started
    result = {
        "accuracy_before": accuracies[0],
        "accuracy_after": accuracies[-1],
        "seconds": round(seconds, 1),
    }
    (run / "summary.json").write_text(json.dumps(result, indent=2) + "\n")
    print(f"held-out greedy accuracy  {accuracies[0]:.1%} before, {accuracies[-1]:.1%} after")
    if arguments.answers:
        print_answers(run, arguments.answers)
    if failed := curve(rows, ("eval/tool_errors",))[1]:
        before = f"{failed[0]:.2f} a conversation before"
        print(f"failed calls of the tool  {before}, {failed[-1]:.2f} after")
    print(f"everything together       {seconds:.0f} s")
    print(f"reward curve              {picture}")
    print(f"Hugging Face folder       {run / 'hf'}")
    print(f"summary                   {run / 'summary.json'}")


if __name__ == "__main__":
    main()
