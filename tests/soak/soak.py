"""One run of the soak: started, killed in part once, resumed if it has ended, and checked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlcore.runs.checkpoints import committed_steps
from rlcore.runs.directory import RunDirectory
from rollout.accounting.audit import audit
from tests.integration.accounting_checks import accounting_faults
from tests.soak.launchers import POLL_S, Launcher, Started
from tests.soak.progress import Moment, Progress, Timeline
from tests.soak.workload import STEPS, prepare

LIMIT_S = 300.0  # for one life of a run
SLOWLY_S = 0.1  # between two searches for victims
DRAWS = 20  # moments to try before giving up


@dataclass(frozen=True)
class Kill:
    """Which process is killed, and when."""

    kind: str
    which: int  # index among the victims
    moment: Moment


@dataclass
class Survivor:
    """The outcome of one run."""

    launcher: str
    kind: str
    where: str  # the progress of the run at the kill
    outcome: str = "went on"
    seconds: float = 0.0  # of all its lives
    faults: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        return [
            self.launcher,
            self.kind,
            self.where,
            self.outcome,
            f"{self.seconds:.0f}",
            "; ".join(self.faults) or "none",
        ]


class Soak:
    """A folder with a model, problems and runs, with an undisturbed run for each launcher.

    Args:
        limit_s: for one life of a run.
        reference: its undisturbed run serves every launcher; None: each has its own.
        conversations: of several turns, with branches and tries that fail, in place of one turn.
        adapters: train adapters in place of all weights.

    Raises RuntimeError where the undisturbed run fails: there is nothing to compare with then.
    """

    def __init__(
        self,
        folder: Path,
        *,
        limit_s: float = LIMIT_S,
        reference: Launcher | None = None,
        conversations: bool = False,
        adapters: bool = False,
    ) -> None:
        self.folder = folder
        self.config = prepare(folder, conversations=conversations, adapters=adapters)
        self._limit_s = limit_s
        self._reference = reference
        self._timelines: dict[str, Timeline] = {}
        self._one_at_a_time = threading.Lock()

    def timeline(self, launcher: Launcher) -> Timeline:
        """The timeline of the undisturbed run, which the first call makes."""
        launcher = self._reference or launcher
        with self._one_at_a_time:
            if launcher.name not in self._timelines:
                self._timelines[launcher.name] = self._undisturbed(launcher)
        return self._timelines[launcher.name]

    def one(self, name: str, launcher: Launcher, kind: str, chance: random.Random) -> Survivor:
        """Run with one kill of this kind; after a moment that came too late, run again.

        Raises RuntimeError when none of the moments hits.
        """
        for draw in range(DRAWS):
            kill = Kill(kind, chance.randrange(2), self.timeline(launcher).draw(chance))
            survivor = self._disturbed(f"{name}_{draw}" if draw else name, launcher, kill)
            if survivor is not None:
                return survivor
        raise RuntimeError(f"{name}: no {kind} was there to be killed at any of {DRAWS} moments")

    # --- its parts --------------------------------------------------------------------------------

    def _undisturbed(self, launcher: Launcher) -> Timeline:
        name = f"undisturbed_{launcher.name}"
        began = time.monotonic()
        started = self._start(name, launcher)
        changes = [(0.0, Progress())]
        while not started.ended and time.monotonic() - began < self._limit_s:
            progress = Progress.of(started.folder)
            if progress != changes[-1][1]:
                changes.append((time.monotonic() - began, progress))
            time.sleep(POLL_S)
        timeline = Timeline(changes, time.monotonic() - began)
        started.kill()
        if faults := [*_how_it_ended(started), *accounting_faults(started.folder, steps=STEPS)]:
            raise RuntimeError(
                f"the undisturbed run failed: {'; '.join(faults)}: see {self._log(name)}"
            )
        return timeline

    def _disturbed(self, name: str, launcher: Launcher, kill: Kill) -> Survivor | None:
        """Run with one kill; None when the run ended well before the kill."""
        began = time.monotonic()
        started = self._start(name, launcher)
        victim = strike(started, kill, limit_s=self._limit_s)
        if victim is None:
            faults = [*self._end(started), *_how_it_ended(started)]
            seconds = time.monotonic() - began
            return (
                Survivor(launcher.name, kill.kind, "never", "failed by itself", seconds, faults)
                if faults
                else None
            )
        survivor = Survivor(launcher.name, *victim)
        survivor.faults += self._end(started)
        if _how_it_ended(started):
            after = max(committed_steps(started.folder / "checkpoints"), default=0)
            if _status(started.folder) == "completed":
                survivor.outcome = "was complete"
            else:
                survivor.outcome = f"resumed after step {after}" if after else "began anew"
                started = self._start(name, launcher, "--resume")
                survivor.faults += [*self._end(started), *_how_it_ended(started)]
        survivor.seconds = time.monotonic() - began
        survivor.faults += self._faults(started.folder, launcher)
        return survivor

    def _faults(self, run: Path, launcher: Launcher) -> list[str]:
        if (status := _status(run)) != "completed":
            return [f"the run is {status}"]
        faults = [*accounting_faults(run, steps=STEPS), *audit(RunDirectory(run)).contradictions]
        undisturbed = self._run(f"undisturbed_{(self._reference or launcher).name}")
        weights, expected = (
            next((folder / "hf").glob("*.safetensors")).read_bytes()
            for folder in (run, undisturbed)
        )
        if weights != expected:
            faults.append("the final weights are not those of the undisturbed run")
        return faults

    def _end(self, started: Started) -> list[str]:
        """Wait for the end, kill what is left, and return faults other than the exit codes."""
        ended = started.wait(self._limit_s)
        left = started.left() if ended else []
        started.kill()
        return (
            [f"outlived its run: {process}" for process in left]
            if ended
            else [f"did not end within {self._limit_s:g} s"]
        )

    def _start(self, name: str, launcher: Launcher, *arguments: str) -> Started:
        return Started.start(
            launcher,
            self._run(name),
            [str(self.config), f"run.name={name}", *arguments],
            self._log(name),
        )

    def _run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def strike(started: Started, kill: Kill, *, limit_s: float) -> tuple[str, str] | None:
    """Kill at the moment, or later once there is a victim; return which, and the run's progress.

    Returns None if the run ended before, or did not get so far within the limit.
    """
    deadline = time.monotonic() + limit_s
    while not Progress.of(started.folder).reached(kill.moment.after):
        if started.ended or time.monotonic() > deadline:
            return None
        started.tend()
        time.sleep(POLL_S)
    due = time.monotonic() + kill.moment.seconds
    victims = started.victims(kill.kind)
    while True:
        while (wait := due - time.monotonic()) > 0:
            time.sleep(min(wait, POLL_S))
        if started.ended or time.monotonic() > deadline:
            return None
        if victims and all(process.is_running() for process in victims[kill.which % len(victims)]):
            break
        started.tend()
        time.sleep(SLOWLY_S)
        victims = started.victims(kill.kind)
    where = str(Progress.of(started.folder))
    number = kill.which % len(victims)
    for process in victims[number]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return kill.kind if len(victims) == 1 else f"{kill.kind} {number}", where


def _status(run: Path) -> str:
    return str((RunDirectory(run).read_result() or {"status": "without a result"})["status"])


def _how_it_ended(started: Started) -> list[str]:
    codes: Sequence[int | None] = started.codes
    return [] if set(codes) == {0} else [f"exit codes {codes}"]
