"""Many short runs, one process of each killed at a moment drawn from a seed: `scripts/soak.sh`."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tests.soak.launchers import LAUNCHERS
from tests.soak.soak import Soak
from tests.soak.workload import STEPS

COLUMNS = ("seed", "launcher", "killed", "when", "the run", "seconds", "faults")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak.sh", description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others count on")
    parser.add_argument("--launcher", nargs="+", choices=LAUNCHERS, default=["local", "torchrun"], help="in turn")
    parser.add_argument("--kind", nargs="+", help="what is killed, in turn (default: all that a launcher knows)")
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"), help="of models, runs and logs; must be new")
    arguments = parser.parse_args()
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists: name another --folder, or delete it")
    arguments.folder.mkdir(parents=True)
    soak, failed, turns = Soak(arguments.folder.resolve()), 0, len(arguments.launcher)
    print(f"{arguments.runs} runs of {STEPS} steps\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        launcher = LAUNCHERS[arguments.launcher[seed % turns]]
        kinds = [kind for kind in launcher.kinds if kind in (arguments.kind or launcher.kinds)]
        if not kinds:
            parser.error(f"--kind: {launcher.name} knows {', '.join(launcher.kinds)}")
        survivor = soak.one(f"seed_{seed}", launcher, kinds[seed // turns % len(kinds)], random.Random(seed))
        failed += bool(survivor.faults)
        print("| " + " | ".join([str(seed), *survivor.cells()]) + " |", flush=True)
    print(f"{failed} of {arguments.runs} runs have faults")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
