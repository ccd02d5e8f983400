"""Runs cases of a target, and reports what the product should not have done.

A case is one broken input for one door of the product. It answers "accepted", or the name of the
refusal that the door documents. Anything else is a finding: another exception, a traceback in the
log, an accepted value that the target's own rules refuse, seconds without an end.
"""

from __future__ import annotations

import logging
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

from tests.fuzz.mutation import Mutator

CASE_CPU_S = 10.0  # of processor time: a machine that is busy with other things does not count
SHOWN = 10  # findings of a target that are reported in full
ACCEPTED = "accepted"
Case = Callable[[Mutator], str]


class WrongValue(AssertionError):
    """The door accepted what the target's own rules refuse, or refused a valid example."""


class Hangs(BaseException):
    """A case used more than CASE_CPU_S; no handler of the product may catch it."""


class Logged(AssertionError):
    """The product wrote a traceback, or an error, into the log."""


@dataclass(frozen=True)
class Target:
    """One door: `open` makes what a target needs, and gives the function that runs a case."""

    name: str
    open: Callable[[], AbstractContextManager[Case]]


@dataclass(frozen=True)
class Finding:
    """What went wrong, and the command that makes it go wrong again."""

    replay: str
    trace: str

    def brief(self) -> str:
        """The error, and the last places before it."""
        lines = [line for line in self.trace.splitlines() if line.strip() and "^^" not in line]
        return "\n".join(lines[-7:])[:1500]


@dataclass
class Report:
    """What a target's cases came to."""

    name: str
    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    found: int = 0
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        refused = {name: n for name, n in self.outcomes.most_common() if name != ACCEPTED}
        by_class = ", ".join(f"{name} {n}" for name, n in refused.items()) or "none"
        return (
            f"{self.name:<20} {self.cases:>7} cases, {self.outcomes[ACCEPTED]:>6} accepted,"
            f" refused: {by_class}; {self.found} findings, {self.seconds:.1f} s"
        )


def run(
    target: Target, *, seed: int, cases: int | None = None, seconds: float | None = None,
    first: int = 0,
) -> Report:  # fmt: skip
    """Run cases until there are `cases` of them, or `seconds` are over.

    Args:
        first: number of the first case. Number 0 is the valid example, which must be accepted.
    """
    report = Report(target.name)
    begun = time.monotonic()
    seen: set[str] = set()
    with target.open() as case, _recorded() as records, _limited():
        number = first
        while (cases is None or report.cases < cases) and (
            seconds is None or time.monotonic() - begun < seconds
        ):
            trace = _run_case(case, f"{target.name}:{seed}:{number}", number, report, records)
            if trace is not None:
                report.found += 1
                kind = _kind(trace)
                if kind not in seen and len(seen) < SHOWN:
                    seen.add(kind)
                    replay = f"python -m tests.fuzz {target.name} --seed {seed} --case {number}"
                    report.findings.append(Finding(replay, trace))
            report.cases += 1
            number += 1
    report.seconds = time.monotonic() - begun
    return report


def _run_case(
    case: Case, seed: str, number: int, report: Report, records: list[logging.LogRecord]
) -> str | None:
    """Run one case. Returns the traceback of a finding."""
    mutator = Mutator(seed, keep=number == 0)
    signal.setitimer(signal.ITIMER_VIRTUAL, CASE_CPU_S)
    try:
        outcome = case(mutator)
        if outcome != ACCEPTED and not mutator.changed:
            raise WrongValue(f"a valid example was refused: {outcome}")
        if records:
            raise Logged(logging.Formatter("%(name)s: %(message)s").format(records[0]))
    except (Exception, Hangs):  # noqa: BLE001 - it is reported as a finding
        records.clear()
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    report.outcomes[outcome] += 1
    return None


def _kind(trace: str) -> str:
    """Return the places of a traceback, which findings with one cause have in common."""
    lines = trace.splitlines()
    places = [line for line in lines if line.startswith("  File")]
    return "\n".join([*places[-2:], lines[-1].partition(":")[0]])


@contextmanager
def _recorded() -> Iterator[list[logging.LogRecord]]:
    """Collect what is logged as an error, or with a traceback."""
    records: list[logging.LogRecord] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            mine = record.name.startswith("rollout.collection.attempts")  # shows users their own
            if (record.exc_info and not mine) or record.levelno >= logging.ERROR:
                records.append(record)

    root = logging.getLogger()
    keeper = Keeper()
    others = root.handlers[:]
    root.handlers[:] = [keeper]
    try:
        yield records
    finally:
        root.handlers[:] = others


@contextmanager
def _limited() -> Iterator[None]:
    """Raise `Hangs` where a case uses more processor time than it may."""

    def ended(*_: object) -> None:
        raise Hangs(f"a case took more than {CASE_CPU_S:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, ended)
    try:
        yield
    finally:
        signal.signal(signal.SIGVTALRM, before)
