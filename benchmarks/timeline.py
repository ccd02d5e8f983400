"""What recording the timeline costs: CPU time and bytes a step, beside the time of the step.

    python benchmarks/timeline.py RUN [RUN ...]     # steps that these runs have recorded
    python benchmarks/timeline.py                   # steps of sizes that are made up

The records of each step are recorded once more, as the run did, into a folder of their own: every
record is made by the calls that the trainer, the dispatcher and the rewards make, then the step is
written. Only this process's CPU time counts, so that other programs do not matter. The cost of a
run's step is divided by its own `time/step`; that of a made-up step by a time that is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import machine

from rlcore.runs.metrics import read_metrics
from rlcore.timeline.files import Record, read_spans
from rlcore.timeline.recorder import Recorder, TrackAllocator, now

MOST_SHARE = 0.01  # of a step
ROUNDS = 7
LIMIT = 1 << 30


@dataclass(frozen=True)
class Cost:
    """What the steps of a workload cost, medians."""

    what: str
    records: float  # a step
    cpu_ms: float  # a step
    bytes: float  # on the disk, a step
    step_s: float

    @property
    def share(self) -> float:
        return self.cpu_ms / 1e3 / self.step_s


def record_again(recorder: Recorder, step: int, given: list[Record]) -> None:
    """Record and write a step as a run does."""
    for kind, track, name, began, ended, args in given:
        if kind == "X":
            now()
            recorder.add(track, name, began, ended, **args)
        elif kind == "i":
            recorder.instant(track, name, **args)
        else:
            recorder.counter(track[0], name, args["value"])
    recorder.flush(step)


def measure(what: str, steps: list[list[Record]], step_s: float, *, rounds: int) -> Cost:
    spent = []
    with tempfile.TemporaryDirectory() as folder:
        for round_ in range(rounds):
            recorder = Recorder()
            recorder.open(Path(folder), f"rank_{round_}", limit_bytes=LIMIT)
            for step, given in enumerate(steps, 1):
                began = time.process_time()
                record_again(recorder, step, given)
                spent.append((time.process_time() - began) * 1e3)
        sizes = [path.stat().st_size for path in Path(folder).iterdir()]
    return Cost(
        what,
        statistics.fmean(len(given) for given in steps),
        statistics.median(spent),
        statistics.fmean(sizes) / len(steps),
        step_s,
    )


def of_run(run: Path, *, rounds: int) -> Cost:
    """The steps of a run, of all its processes."""
    by_step: dict[int, list[Record]] = {}
    for span in read_spans(run).spans:
        if span.step > 0:
            record = (span.kind, (span.group, span.lane), span.name, span.begin, span.end)
            by_step.setdefault(span.step, []).append((*record, span.args))
    steps = list(by_step.values())
    seconds = [row["time/step"] for row in read_metrics(run / "metrics.jsonl") if row["step"] > 0]
    return measure(run.name, steps, statistics.median(seconds), rounds=rounds)


def made_up(prompts: int, samples: int, turns: int) -> list[Record]:
    """A step of prompts x samples rollouts: requests, rewards, and tools between the turns."""

    def spans() -> Iterator[Record]:
        slots = TrackAllocator("engine engine-0", "slot")
        workers = TrackAllocator("rewards", "worker")
        at = 1e5
        for draw in range(prompts):
            group = f"1234567/{draw}"
            for sample in range(samples):
                for turn in range(turns):
                    args: dict[str, Any] = {
                        "groups": [group],
                        "samples": [(sample, 1)],
                        "turn": turn,
                        "prompt_tokens": 300 + turn,
                        "waited_s": 0.001234,
                        "waited_for": "room at an engine",
                        "tokens": 200,
                    }
                    track = slots.track(slots.take())
                    yield ("X", track, "request", at, at + 2.34567, args)
                    if turn + 1 < turns:
                        yield ("X", ("tools", "call 3"), "add", at, at + 0.1, {"group": group})
                    slots.give_back(0)
                    at += 0.000123
                reward = {"sample": sample, "waited_s": 0.000321, "group": group}
                yield ("X", workers.track(sample), "math", at, at + 0.0123, reward)

    return list(spans())


def of_calls(count: int) -> dict[str, float]:
    """Nanoseconds of CPU of one call, recording and not."""
    track = ("rank 0", "main")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, limit in (("on", LIMIT), ("off", 0)):
            recorder = Recorder()
            recorder.max_records = count * 2
            recorder.open(Path(folder), name, limit_bytes=limit)

            def add(recorder: Recorder = recorder) -> None:
                recorder.add(track, "request", 1.0, 2.0, group="1/2", tokens=3)

            def span(recorder: Recorder = recorder) -> None:
                with recorder.span(track, "training"):
                    pass

            for call in (add, span):
                found[f"{call.__name__}, {name}"] = nanoseconds(call, count)
    return found


def nanoseconds(call: Callable[[], None], count: int) -> float:
    began = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - began) * 1e9 / count


def main() -> int:
    """Print a table. Exit code 1: recording takes more than `MOST_SHARE` of some step."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN")
    parser.add_argument("--quick", action="store_true", help="one round; numbers mean little")
    parser.add_argument("--json", type=Path, help="write the numbers here, too")
    options = parser.parse_args()
    rounds = 1 if options.quick else ROUNDS
    costs = [of_run(run, rounds=rounds) for run in options.runs]
    if not options.runs:
        for prompts, samples, turns, step_s in (
            (32, 8, 1, 5.0),
            (512, 8, 1, 60.0),
            (256, 8, 6, 60.0),
        ):
            what = f"{prompts} x {samples} rollouts of {turns} turns"
            given = made_up(prompts, samples, turns)
            costs.append(measure(what, [given] * 3, step_s, rounds=rounds))
    calls = of_calls(2_000 if options.quick else 50_000)
    print("| step | records | CPU ms | bytes | of a step of | share |")
    print("|---|---:|---:|---:|---:|---:|")
    for cost in costs:
        print(
            f"| {cost.what} | {cost.records:.0f} | {cost.cpu_ms:.2f} | {cost.bytes:.0f} |"
            f" {cost.step_s:.2f} s | {cost.share:.3%} |"
        )
    print("\nCPU ns a call: " + ", ".join(f"{name} {ns:.0f}" for name, ns in calls.items()))
    if options.json is not None:
        rows = [vars(cost) | {"share": cost.share} for cost in costs]
        found = {"machine": machine(), "steps": rows, "calls_ns": calls}
        options.json.write_text(json.dumps(found, indent=1))
    worst = max(cost.share for cost in costs)
    verdict = "MISSED" if worst > MOST_SHARE else "reached"
    print(f"\ngoal: at most {MOST_SHARE:.0%} of a step: {verdict}")
    return 1 if worst > MOST_SHARE else 0


if __name__ == "__main__":
    raise SystemExit(main())
