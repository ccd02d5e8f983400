"""The clock of a start: phases, phases inside phases, its line, and the age of a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlcore.timeline import start as module
from rlcore.timeline.start import StartClock, process_start


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> tuple[StartClock, list[float]]:
    """A clock, and the time of the world in seconds."""
    time = [100.0]
    monkeypatch.setattr(module, "now", lambda: time[0])
    return StartClock(), time


def test_a_phase_counts_without_those_inside_it(clock: tuple[StartClock, list[float]]) -> None:
    found, time = clock
    found.origin = 97.0
    found.begin()
    with found.phase("models"):
        time[0] += 2.0
        for _ in range(2):
            with found.phase("weights"):
                time[0] += 3.0
                with found.phase("disk"):
                    time[0] += 0.5
        time[0] += 1.0
    time[0] += 0.25
    assert found.seconds == {"imports": 3.0, "disk": 1.0, "weights": 6.0, "models": 3.0}
    assert found.spans[0] == ("imports", 97.0, 100.0)
    assert found.spans[-1] == ("models", 100.0, 110.0)
    total = found.finish()
    assert total == 13.25
    said = "started in 13.2 s: imports 3.0, disk 1.0, weights 6.0, models 3.0"
    assert found.line(total) == said


def test_a_failed_phase_counts_too(clock: tuple[StartClock, list[float]]) -> None:
    found, time = clock
    found.begin()

    def fail() -> None:
        with found.phase("models"), found.phase("weights"):
            time[0] += 2.0
            raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        fail()
    assert found.seconds == {"imports": 0.0, "weights": 2.0, "models": 0.0}


def test_a_clock_that_does_not_run_measures_nothing(clock: tuple[StartClock, list[float]]) -> None:
    found, time = clock
    with found.phase("models"):
        time[0] += 2.0
    assert found.finish() is None
    assert not found.seconds
    found.begin()
    time[0] += 0.04
    assert found.finish() == pytest.approx(0.04)
    assert found.finish() is None


def test_another_start_of_the_process_begins_anew(clock: tuple[StartClock, list[float]]) -> None:
    found, time = clock
    found.origin = 90.0
    found.begin()
    with found.phase("models"):
        time[0] += 2.0
    found.begin()  # the process is not as new any more
    assert found.seconds == {"imports": 0.0}
    assert found.line(0.5) == "started in 0.5 s"


def test_a_process_knows_when_it_was_made() -> None:
    program = (
        "import time; time.sleep(0.3); from rlcore.timeline.start import now, process_start;"
        "print(now() - process_start())"
    )
    age = float(subprocess.run([sys.executable, "-c", program], capture_output=True).stdout)
    assert 0.29 < age < 60


def test_a_system_that_does_not_tell_a_process_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Path", lambda name: Path("/nowhere"))
    before = module.now()
    assert before <= process_start() <= module.now()
