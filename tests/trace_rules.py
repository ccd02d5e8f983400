"""A strict reader of Chrome's trace-event format: it refuses what Perfetto would repair or drop."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Thread = tuple[int, int]
FIELDS: dict[str, set[str]] = {
    "M": {"ph", "name", "pid", "tid", "ts", "args"},
    "X": {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"ph", "name", "cat", "pid", "tid", "ts", "s", "args"},
    "C": {"ph", "name", "cat", "pid", "tid", "ts", "args"},
    "s": {"ph", "name", "cat", "pid", "tid", "ts", "id"},
    "f": {"ph", "name", "cat", "pid", "tid", "ts", "id", "bp"},
}


def read_trace(path: Path) -> list[Event]:
    """Read a trace and check it all; AssertionError says what is wrong."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    whole = json.loads(text, parse_constant=_refuse)
    assert isinstance(whole["traceEvents"], list)
    check_events(whole["traceEvents"])
    return list(whole["traceEvents"])


def check_events(events: list[Event]) -> None:
    """Check fields, order, names, nesting and flows."""
    for event in events:
        assert set(event) == FIELDS[event["ph"]], event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        for key in ("pid", "tid"):
            assert type(event[key]) is int, event
            assert event[key] > 0, event
        assert math.isfinite(event["ts"]), event
        assert event["ts"] >= 0, event
        assert event.get("bp", "e") == "e", event
        assert event.get("s", "t") == "t", event
    timed = [event for event in events if event["ph"] != "M"]
    for before, after in pairwise(timed):
        assert before["ts"] <= after["ts"], f"not in order: {before} {after}"
    _check_names(events)
    _check_counters(timed)
    spans = _check_nesting(timed)
    _check_flows(timed, spans)


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
    processes = [e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"]
    threads = [
        (e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"
    ]
    assert len(set(processes)) == len(processes), "a process is named twice"
    assert len(set(threads)) == len(threads), "a thread is named twice"
    assert len({tid for _, tid in threads}) == len(threads), "two threads have one number"
    used = {(e["pid"], e["tid"]) for e in events if e["ph"] != "M"}
    assert used <= set(threads), f"threads without a name: {used - set(threads)}"
    assert {pid for pid, _ in used} <= set(processes)
    names = list(names_of(events).values())
    assert len(set(names)) == len(names), "two threads of a process have one name"


def _check_counters(events: list[Event]) -> None:
    for event in events:
        if event["ph"] == "C":
            assert event["args"], event
            assert all(type(value) is float for value in event["args"].values()), event


def _check_nesting(events: list[Event]) -> dict[Thread, list[tuple[int, int]]]:
    """The spans of a thread lie beside or inside each other. Returns them, in nanoseconds."""
    spans: dict[Thread, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            begin = round(event["ts"] * 1000)
            end = begin + round(event["dur"] * 1000)
            spans[event["pid"], event["tid"]].append((begin, end))
    for thread, found in spans.items():
        open_until: list[int] = []
        for begin, end in found:
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"{thread}: {begin}, {end} is cut"
            open_until.append(end)
    return spans


def _check_flows(events: list[Event], spans: dict[Thread, list[tuple[int, int]]]) -> None:
    """An id has one begin and one end, in this order, each inside a span of its thread."""
    ends: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "f"):
            ends[event["id"]].append(event)
            at = round(event["ts"] * 1000)
            inside = spans.get((event["pid"], event["tid"]), [])
            assert any(begin <= at <= end for begin, end in inside), f"in no span: {event}"
    for number, pair in ends.items():
        assert [event["ph"] for event in pair] == ["s", "f"], f"flow {number}: {pair}"
        assert pair[0]["name"] == pair[1]["name"], f"flow {number}: {pair}"
