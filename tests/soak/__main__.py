"""Many short runs, one process of each killed at a moment drawn from a seed: `scripts/soak.sh`."""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

from tests.network.cluster import why_not
from tests.network.slurm import why_no_slurm
from tests.soak.launchers import LAUNCHERS, NETWORK, Launcher
from tests.soak.soak import LIMIT_S, Soak
from tests.soak.workload import STEPS

COLUMNS = ("seed", "launcher", "link", "killed", "when", "the run", "seconds", "faults")

NAMES = {**LAUNCHERS, **NETWORK}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/soak.sh", description=__doc__)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the others count on")
    parser.add_argument(
        "--launcher",
        nargs="+",
        action="append",
        choices=NAMES,
        help="in turn (default: all); given several times: so many runs at a time",
    )
    parser.add_argument(
        "--kind", nargs="+", help="what is killed, in turn (default: all that a launcher knows)"
    )
    parser.add_argument(
        "--reference",
        choices=NAMES,
        help="whose undisturbed run all are compared with (default: its own)",
    )
    parser.add_argument(
        "--conversations",
        action="store_true",
        help="rollouts of several turns, with branches and tries that fail",
    )
    parser.add_argument(
        "--adapters", action="store_true", help="train low-rank adapters, not all weights"
    )
    parser.add_argument(
        "--network",
        action="store_true",
        help="nodes with networks of their own, with faults of their links; needs root",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_S,
        metavar="S",
        help="for one life of a run (%(default)g)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/soak"),
        help="of models, runs and logs; must be new",
    )
    return parser


def _known(arguments: argparse.Namespace) -> dict[str, Launcher]:
    return NETWORK if arguments.network else LAUNCHERS


def _lanes(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[list[Launcher]]:
    """The launchers of each lane; ends the program if one cannot be had."""
    known = _known(arguments)
    if arguments.network and (reason := why_not()):
        parser.error(f"--network: {reason}")
    skipped = why_no_slurm() if arguments.network else ""
    names = [name for name in known if not (skipped and name == "slurm")]
    asked = arguments.launcher or [names]
    named = {name for lane in asked for name in lane} | {arguments.reference or names[0]}
    if unknown := named - {*known}:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(known)}")
    if skipped and "slurm" in named:
        parser.error(f"slurm: {skipped}")
    if skipped:
        print(f"slurm is skipped: {skipped}")
    lanes = [[known[name] for name in lane] for lane in asked]
    for launcher in (one for lane in lanes for one in lane):
        if not kinds_of(launcher, arguments.kind):
            parser.error(
                f"--kind: {launcher.name} knows {', '.join(dict.fromkeys(launcher.kinds))}"
            )
    return lanes


def main() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    lanes = _lanes(parser, arguments)
    if arguments.folder.exists():
        parser.error(f"{arguments.folder} exists: name another --folder, or delete it")
    arguments.folder.mkdir(parents=True)
    soak = Soak(
        arguments.folder.resolve(),
        limit_s=arguments.limit,
        reference=_known(arguments).get(arguments.reference),
        conversations=arguments.conversations,
        adapters=arguments.adapters,
        network=arguments.network,
    )
    print(
        f"{arguments.runs} runs of {STEPS} steps\n\n| {' | '.join(COLUMNS)}"
        f" |\n|{'---|' * len(COLUMNS)}",
        flush=True,
    )
    seeds = iter(range(arguments.seed, arguments.seed + arguments.runs))
    with ThreadPoolExecutor(len(lanes)) as pool:
        failed = sum(pool.map(lambda lane: run(soak, lane, arguments.kind, seeds), lanes))
    print(f"{failed} of {arguments.runs} runs have faults")
    return 1 if failed else 0


def run(
    soak: Soak, launchers: Sequence[Launcher], asked: Sequence[str] | None, seeds: Iterator[int]
) -> int:
    """Run the next seeds, launchers and kinds in turn until none is left; count faulty runs."""
    failed = 0
    counts = Counter[str]()
    for launcher, seed in zip(cycle(launchers), seeds):
        kinds = kinds_of(launcher, asked)
        survivor = soak.one(
            f"seed_{seed}", launcher, kinds[counts[launcher.name] % len(kinds)], random.Random(seed)
        )
        counts[launcher.name] += 1
        failed += bool(survivor.faults)
        print("| " + " | ".join([str(seed), *survivor.cells()]) + " |", flush=True)
    return failed


def kinds_of(launcher: Launcher, asked: Sequence[str] | None) -> list[str]:
    return [kind for kind in launcher.kinds if kind in (asked or launcher.kinds)]


if __name__ == "__main__":
    sys.exit(main())
