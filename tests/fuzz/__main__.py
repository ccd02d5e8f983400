"""`python -m tests.fuzz [TARGET ...] --cases N --seed S --seconds T`; exit code 1 for findings."""

from __future__ import annotations

import argparse
import faulthandler
import sys

from tests.fuzz.harness import run
from tests.fuzz.targets import TARGETS

HANG_S = 120.0  # after this the stacks of a target that overruns its time are written, and it ends


def main() -> int:
    """Run targets one after the other, and print a line for each, and its findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(TARGETS))
    parser.add_argument("--cases", type=int, help="of each target (default: as time allows)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this case alone, and show its traceback")
    given = parser.parse_args()
    if unknown := [name for name in given.targets if name not in TARGETS]:
        parser.error(f"no target {unknown[0]}; there are {', '.join(TARGETS)}")
    found = 0
    total = 0
    for name in given.targets or TARGETS:
        faulthandler.dump_traceback_later(given.seconds + HANG_S, exit=True)
        only = given.case is not None
        report = run(
            TARGETS[name],
            seed=given.seed,
            cases=1 if only else given.cases,
            seconds=None if only else given.seconds,
            first=given.case or 0,
        )
        faulthandler.cancel_dump_traceback_later()
        print(report, flush=True)
        for finding in report.findings:
            print(f"--- {finding.replay}\n{finding.trace if only else finding.brief()}", flush=True)
        found += report.found
        total += report.cases
    print(f"{total} cases, {found} findings")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
