"""Times several functions in turn, round after round, so that other load hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

ROUNDS = 31
SLOW_SECONDS = 0.3  # what takes longer than this gets SLOW_ROUNDS
SLOW_ROUNDS = 3


@dataclass(frozen=True)
class Entry:
    """One way of doing the work of a case."""

    what: str
    run: Callable[[], object]
    agreement: str = ""  # how its numbers compare with ours
    once: bool = False  # a single run, without warm-up


@dataclass(frozen=True)
class Row:
    case: str
    what: str
    seconds: tuple[float, ...]
    agreement: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Goal:
    """A ratio of times to reach: at most `limit`, or at least."""

    text: str
    measured: float
    limit: float
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


@dataclass(frozen=True)
class Section:
    title: str
    note: str
    rows: tuple[Row, ...]
    goals: tuple[Goal, ...]


def race(case: str, entries: Sequence[Entry], device: torch.device) -> dict[str, Row]:
    """The entries by what they are, each with the seconds of its rounds.

    In each round an entry runs twice and the second run counts, so that none finds the caches as
    its neighbour left them.
    """
    rounds = {entry.what: 1 if entry.once else _rounds(entry, device) for entry in entries}
    seconds: dict[str, list[float]] = {entry.what: [] for entry in entries}
    for index in range(max(rounds.values())):
        for entry in entries:
            if index < rounds[entry.what]:
                if rounds[entry.what] == ROUNDS:
                    entry.run()
                seconds[entry.what].append(_seconds(entry.run, device))
    return {
        entry.what: Row(case, entry.what, tuple(seconds[entry.what]), entry.agreement)
        for entry in entries
    }


def ratio(rows: Mapping[str, Row], what: str, base: str) -> float:
    """How many times as long `what` takes as `base`: the median over rounds, or of the medians
    where rounds differ.
    """
    ours = rows[what].seconds
    theirs = rows[base].seconds
    if len(ours) == len(theirs):
        return statistics.median(a / b for a, b in zip(ours, theirs))
    return rows[what].median / rows[base].median


def agreement(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """The largest difference in units of the largest number."""
    ours = ours.double().cpu()
    theirs = theirs.double().cpu()
    difference = float((ours - theirs).abs().max() / ours.abs().max())
    return f"same to {difference:.0e}" if difference < 1e-4 else f"DIFFERS by {difference:.0e}"


def _rounds(entry: Entry, device: torch.device) -> int:
    _seconds(entry.run, device)
    return SLOW_ROUNDS if _seconds(entry.run, device) > SLOW_SECONDS else ROUNDS


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
