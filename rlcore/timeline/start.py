"""Times the phases of a process's start, up to its first step.

A process has one clock, `START`. Until `begin` it measures nothing.

    with START.phase("models"):
        ...
        with START.phase("weights"):  # counts as weights alone
            ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHORT_S = 0.05  # shorter phases are left out of the line

now = time.perf_counter


class StartClock:
    """Adds up the phases of a start, on the thread that starts the process."""

    def __init__(self) -> None:
        # The time at which the process began, if known.
        self.origin: float | None = None
        # None while the clock does not run.
        self.began: float | None = None
        # The seconds of each phase, without phases inside it.
        self.seconds: dict[str, float] = {}
        # Name, begin and end of each phase, ordered by end.
        self.spans: list[tuple[str, float, float]] = []
        # The seconds of the phases inside each open phase.
        self._inside: list[float] = []

    def begin(self) -> None:
        """Begin to measure. The time since `origin`, if known, counts as imports."""
        moment = now()
        self.began = moment if self.origin is None else self.origin
        self.origin = None
        self.seconds = {"imports": moment - self.began}
        self.spans = [("imports", self.began, moment)]
        self._inside = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block as `name`, without phases inside it."""
        if self.began is None:
            yield
            return
        began = now()
        self._inside.append(0.0)
        try:
            yield
        finally:
            ended = now()
            own = ended - began - self._inside.pop()
            if self._inside:
                self._inside[-1] += ended - began
            self.seconds[name] = self.seconds.get(name, 0.0) + own
            self.spans.append((name, began, ended))

    def finish(self) -> float | None:
        """Stop measuring. Returns the seconds of the whole start; None if the clock did not run."""
        if self.began is None:
            return None
        total = now() - self.began
        self.began = None
        return total

    def line(self, total: float) -> str:
        """Describe a finished start in a line: "started in 41.0 s: imports 3.1, ranks 0.5, ..."."""
        parts = [f"{name} {spent:.1f}" for name, spent in self.seconds.items() if spent >= SHORT_S]
        return ": ".join(filter(None, (f"started in {total:.1f} s", ", ".join(parts))))


START = StartClock()


def process_start() -> float:
    """Return this process's start on the clock of `now`; the current time if unknown."""
    moment = now()
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        # The process's start, counted from the boot of the machine.
        ticks = int(fields[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    # The system is not Linux.
    except (OSError, AttributeError):
        return moment
    return moment - max(age, 0.0)
