"""Simulates asynchronous training, event by event, with the scheduler that runs use.

Nothing is measured here but the order of things; `async_world.py` says what is simulated. `of the
bound` is the time that no order of things can beat, max(slot-seconds of the groups trained on /
slots, seconds of training), over the simulated time: publications, failures, dropped groups and
waiting for long responses are what there is to lose. Exit code 1: the first setting stays below
0.95 at a staleness of 2.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulation.async_world import Outcome, Setting, Simulation

GOAL = 0.95
GOAL_STALENESS = 2

# Lengths are made up in all of them, with the tail of reasoning: one in a hundred reaches the
# longest of 64k. What others report are batch sizes and longest responses: DAPO (arXiv:2503.14476),
# and Moonlight in Seer (arXiv:2511.14617).
SETTINGS = {
    "2048 x 16 responses of up to 64k": Setting(),
    "the same, training takes 1.5 of generation": Setting(train_share=1.5),
    "the same, a filter drops 30 %, oversample 1.4": Setting(dropped=0.3, oversample=1.4),
    "512 x 16 of up to 20k (DAPO's batch)": Setting(groups=512, median=5000.0, longest=20480),
    "512 x 16 of up to 64k": Setting(groups=512),
    "400 x 8 of up to 64k (Moonlight's batch)": Setting(groups=400, samples=8, median=20000.0),
}

COLUMNS = (
    "setting",
    "k",
    "of the bound",
    "steps/h",
    "trainer idle",
    "engines idle",
    "staleness, mean",
    "max",
    "expired",
    "longest, in steps",
)


def row(name: str, found: Outcome, max_staleness: int) -> list[str]:
    return [
        name,
        str(max_staleness),
        f"{found.of_bound:.3f}",
        f"{3600 * found.setting.steps / found.seconds:.2f}",
        f"{1 - found.trained_s / found.seconds:.3f}",
        f"{1 - found.busy_seconds / found.setting.slots / found.seconds:.3f}",
        f"{statistics.fmean(found.staleness):.2f}",
        str(max(found.staleness)),
        str(found.expired),
        f"{found.longest_in_steps:.1f}",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="counted, after the first few")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--only", default="", help="settings whose name contains this")
    arguments = parser.parse_args()
    goal_setting = next(iter(SETTINGS))
    code = 0
    print("| " + " | ".join(COLUMNS) + " |\n|---|" + "---:|" * (len(COLUMNS) - 1))
    for name, setting in SETTINGS.items():
        for k in arguments.staleness if arguments.only in name else ():
            found = Simulation(replace(setting, steps=arguments.steps), k).run()
            print("| " + " | ".join(row(name, found, k)) + " |", flush=True)
            if name == goal_setting and k == GOAL_STALENESS and found.of_bound < GOAL:
                code = 1
    if code:
        print(f"{goal_setting} at k = {GOAL_STALENESS}: below {GOAL}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
