"""One run of the soak: started, killed in part once, resumed if it has ended, and checked."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from rlcore.runs.checkpoints import committed_steps
from rlcore.runs.directory import RunDirectory
from rollout.accounting.audit import audit
from tests.integration.accounting_checks import accounting_faults
from tests.soak.launchers import POLL_S, Launcher, Started
from tests.soak.network import FAULTS, Network
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
    link: str = "sound"
    outcome: str = "went on"
    seconds: float = 0.0  # of all its lives
    faults: list[str] = field(default_factory=list)

    def cells(self) -> list[str]:
        return [
            self.launcher,
            self.link,
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
        network: nodes have networks of their own, with faults of their links.

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
        network: bool = False,
    ) -> None:
        self._network = network
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
        fault = chance.choice(FAULTS) if self._network else ""
        cut = self.timeline(launcher).draw(chance) if fault == "cut" else None
        for draw in range(DRAWS):
            timeline = self.timeline(launcher)
            kill = Kill(kind, chance.randrange(2), timeline.draw(chance))
            tried = f"{name}_{draw}" if draw else name
            with self._nodes(tried, launcher, fault) as network:
                if network is not None and cut is not None:
                    network.cut_at(self._run(tried), cut)
                survivor = self._disturbed(tried, launcher, kill, network)
            if survivor is not None:
                return survivor
        raise RuntimeError(f"{name}: no {kind} was there to be killed at any of {DRAWS} moments")

    # --- its parts --------------------------------------------------------------------------------

    def _undisturbed(self, launcher: Launcher) -> Timeline:
        name = f"undisturbed_{launcher.name}"
        with self._nodes(name, launcher, "card") as network:
            return self._observe(name, launcher, network)

    def _observe(self, name: str, launcher: Launcher, network: Network | None) -> Timeline:
        began = time.monotonic()
        started = self._start(name, launcher, network)
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

    @contextmanager
    def _nodes(self, name: str, launcher: Launcher, fault: str) -> Iterator[Network | None]:
        """The nodes of a run with networks of their own; None: they are all this machine."""
        if not self._network:
            yield None
            return
        with_slurm = launcher.name == "slurm"
        network = Network(self.folder / f"{name}_nodes", fault, with_slurm=with_slurm)
        try:
            yield network
        finally:
            network.close()

    def _disturbed(
        self, name: str, launcher: Launcher, kill: Kill, network: Network | None
    ) -> Survivor | None:
        """Run with one kill; None when the run ended well before the kill."""
        began = time.monotonic()
        started = self._start(name, launcher, network)
        victim = strike(started, kill, limit_s=self._limit_s)
        if victim is None:
            faults = [*self._end(started), *_how_it_ended(started)]
            seconds = time.monotonic() - began
            if not faults:
                return None
            link = network.link if network is not None else "sound"
            return Survivor(
                launcher.name, kill.kind, "never", link, "failed by itself", seconds, faults
            )
        survivor = Survivor(launcher.name, *victim)
        survivor.faults += self._end(started)
        if _how_it_ended(started):
            after = max(committed_steps(started.folder / "checkpoints"), default=0)
            if _status(started.folder) == "completed":
                survivor.outcome = "was complete"
            else:
                survivor.outcome = f"resumed after step {after}" if after else "began anew"
                started = self._start(name, launcher, network, "--resume")
                survivor.faults += [*self._end(started), *_how_it_ended(started)]
        survivor.seconds = time.monotonic() - began
        survivor.link = network.link if network is not None else survivor.link
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

    def _start(
        self, name: str, launcher: Launcher, network: Network | None, *arguments: str
    ) -> Started:
        return Started.start(
            launcher,
            self._run(name),
            [str(self.config), f"run.name={name}", *arguments],
            self._log(name),
            network,
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
