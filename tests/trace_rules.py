"""A strict reader of Chrome's trace-event format: it refuses what Perfetto would repair or drop."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Thread = tuple[int, int]
FIELDS: dict[str, set[str]] = {
    "M": {"ph", "name", "pid", "tid", "ts", "args"},
    "X": {"ph", "name", "pid", "tid", "ts", "dur", "args"},
    "i": {"ph", "name", "pid", "tid", "ts", "s", "args"},
    "C": {"ph", "name", "pid", "tid", "ts", "args"},
}


def read_trace(path: Path) -> list[Event]:
    """Read a trace and check it all; AssertionError says what is wrong."""
    text = gzip.decompress(path.read_bytes()).decode()
    assert text.startswith("[\n{")
    assert text.endswith("},\n")
    events = json.loads(text[:-2] + "]", parse_constant=_refuse)
    check_events(events)
    return list(events)


def check_events(events: list[Event]) -> None:
    """Check fields, names and nesting."""
    for event in events:
        assert set(event) == FIELDS[event["ph"]], event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        for key in ("pid", "tid"):
            assert type(event[key]) is int, event
            assert event[key] > 0, event
        assert math.isfinite(event["ts"]), event
        assert event["ts"] >= 0, event
        assert event.get("s", "t") in ("t", "p"), event
    timed = [event for event in events if event["ph"] != "M"]
    _check_names(events)
    _check_counters(timed)
    _check_nesting(timed)


def names_of(events: list[Event]) -> dict[Thread, tuple[str, str]]:
    """Return the names of process and thread of each thread."""
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    return {
        (e["pid"], e["tid"]): (processes[e["pid"]], e["args"]["name"])
        for e in events
        if e["name"] == "thread_name"
    }


def _refuse(text: str) -> float:
    raise AssertionError(f"{text} is no JSON")


def _check_names(events: list[Event]) -> None:
    """Each number has one name, however often it is named, and each name one number."""
    processes = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    threads = {(e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    for named in (processes, threads):
        assert len({number for number, _ in named}) == len(named), f"two names: {named}"
    assert len({name for _, name in processes}) == len(processes), "two processes have one name"
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] != "M" and e.get("s") != "p"}
    assert used <= set(names_of(events)), "threads without a name"


def _check_counters(events: list[Event]) -> None:
    for event in events:
        if event["ph"] == "C":
            assert event["args"], event
            assert all(type(value) in (int, float) for value in event["args"].values()), event


def _check_nesting(events: list[Event]) -> None:
    """The spans of a thread lie beside or inside each other."""
    spans: dict[Thread, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            spans[event["pid"], event["tid"]].append((event["ts"], -event["dur"]))
    for thread, found in spans.items():
        open_until: list[int] = []
        for begin, duration in sorted(found):
            end = begin - duration
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{thread}: {begin}, {end} is cut"
            open_until.append(end)
