"""A timeline in Chrome's trace-event format, which ui.perfetto.dev and chrome://tracing open."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from rlcore.timeline.idle import idle_spans
from rlcore.timeline.read import Span, Timeline

Event = dict[str, Any]
# Groups in the order in which they are shown; of a name that begins so.
ORDER = ("rank ", "publication", "rollouts", "engine ", "tools", "rewards")
MICROSECOND = 1000  # ns, the unit in which times are compared


class Lanes:
    """Places spans on threads so that those of a thread nest.

    A span that overlaps another of its lane in part, as two processes whose clocks disagree may
    record them, gets a lane beside it.
    """

    def __init__(self) -> None:
        self.ids: dict[tuple[str, str], tuple[int, int]] = {}  # of a lane: process, thread
        self._open: dict[tuple[str, str], list[list[int]]] = {}

    def place(self, span: Span) -> tuple[int, int]:
        """Return process and thread of the next span; spans come by begin, longer ones first."""
        begin, end = nanoseconds(span)
        stacks = self._open.setdefault((span.group, span.lane), [])
        for number, stack in enumerate(stacks):
            while stack and stack[-1] <= begin:
                stack.pop()
            if not stack or stack[-1] >= end:
                stack.append(end)
                return self.thread(span.group, _numbered(span.lane, number))
        stacks.append([end])
        return self.thread(span.group, _numbered(span.lane, len(stacks) - 1))

    def thread(self, group: str, lane: str) -> tuple[int, int]:
        """Return the numbers of a lane."""
        if (group, lane) not in self.ids:
            process = next(
                (pid for (name, _), (pid, _) in self.ids.items() if name == group),
                len({name for name, _ in self.ids}) + 1,
            )
            self.ids[group, lane] = (process, len(self.ids) + 1)
        return self.ids[group, lane]

    def names(self) -> Iterator[Event]:
        """Yield the metadata events, which name processes and threads."""
        done = set()
        for (group, lane), (pid, tid) in self.ids.items():
            if pid not in done:
                done.add(pid)
                yield _metadata("process_name", pid, tid, {"name": group})
                yield _metadata("process_sort_index", pid, tid, {"sort_index": _place(group)})
            yield _metadata("thread_name", pid, tid, {"name": lane})


def write_trace(timeline: Timeline, path: Path, *, title: str) -> int:
    """Write a trace, compressed where `path` ends in .gz. Returns how many events it has."""
    events = trace_events(timeline)
    about = {"run": title, "began": timeline.wall, "lost_records": timeline.lost}
    level = 6 if path.suffix == ".gz" else 0
    with open(path, "wb") as raw, _compressing(raw, level) as write:
        head = {"displayTimeUnit": "ms", "otherData": about}
        write(json.dumps(head)[:-1].encode() + b', "traceEvents": [\n')
        for number, event in enumerate(events):
            comma = b"" if number == 0 else b",\n"
            write(comma + json.dumps(event, allow_nan=False).encode())
        write(b"\n]}\n")
    return len(events)


@contextmanager
def _compressing(raw: BinaryIO, level: int) -> Iterator[Callable[[bytes], object]]:
    """Yield what writes to `raw`, through gzip where `level` is not 0."""
    if not level:
        yield raw.write
        return
    with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=level) as packed:
        yield packed.write


def trace_events(timeline: Timeline) -> list[Event]:
    """Return the events: names first, then spans, moments, counters and flows by their time."""
    lanes = Lanes()
    spans = [*timeline.spans, *idle_spans(timeline.spans)]
    spans.sort(key=lambda span: (nanoseconds(span)[0], -nanoseconds(span)[1]))
    placed: dict[int, tuple[int, int]] = {}
    events: list[Event] = []
    for span in spans:
        if span.kind == "C":
            pid, tid = lanes.thread(span.group, span.name)
            args = {span.name: float(span.args["value"])}
        else:
            pid, tid = lanes.place(span)
            placed[id(span)] = (pid, tid)
            args = dict(span.args)
        event: Event = {"ph": span.kind, "name": span.name, "pid": pid, "tid": tid, "args": args}
        event |= {"cat": category(span.group), "ts": nanoseconds(span)[0]}
        if span.kind == "X":
            event["dur"] = nanoseconds(span)[1] - nanoseconds(span)[0]
        elif span.kind == "i":
            event["s"] = "t"
        events.append(event)
    for number, (name, source, target) in enumerate(flows(spans), start=1):
        events += _flow(number, name, source, target, placed)
    # Stable: the spans that begin at a flow's time are before it, and outer spans before inner.
    events.sort(key=lambda event: (event["ts"], event["ph"] in "sf"))
    for event in events:
        for key in ("ts", "dur"):
            if key in event:
                event[key] = event[key] / MICROSECOND
    return [*lanes.names(), *events]


def flows(spans: Sequence[Span]) -> Iterator[tuple[str, Span, Span]]:
    """Yield the arrows: from a request to its rewards, from a publication to the engines."""
    asked: dict[str, list[Span]] = {}
    publications: dict[int, Span] = {}
    for span in spans:
        if span.name == "request":
            for group in dict.fromkeys(span.args.get("groups", ())):
                asked.setdefault(group, []).append(span)
        elif span.group == "publication" and "publication" in span.args:
            publications.setdefault(span.args["publication"], span)
    for span in spans:
        if span.group == "rewards" and (found := _request_of(span, asked)) is not None:
            yield "scored", found, span
        elif span.lane == "weights" and span.args.get("publication") in publications:
            source = publications[span.args["publication"]]
            if source.begin <= span.begin <= source.end:
                yield "weights", source, span


def _request_of(reward: Span, asked: dict[str, list[Span]]) -> Span | None:
    """Return the last request that made tokens of the sample, else the last of its group."""
    group = reward.args.get("group", "")
    sample = reward.args.get("sample")
    before = [s for s in asked.get(group, ()) if nanoseconds(s)[1] <= nanoseconds(reward)[0]]
    own = [
        span
        for span in before
        if any(
            group == of and sample is not None and first <= sample < first + n
            for of, (first, n) in zip(span.args["groups"], span.args["samples"])
        )
    ]
    return max(own or before, key=lambda span: span.end, default=None)


def _flow(
    number: int, name: str, source: Span, target: Span, placed: dict[int, tuple[int, int]]
) -> Iterator[Event]:
    """Make the two ends of an arrow, each inside its span."""
    end = nanoseconds(target)[0]
    begin = nanoseconds(source)[0]
    # as late in the source as it may be
    start = max(begin, min(end, nanoseconds(source)[1] - 1))
    common = {"cat": "flow", "name": name, "id": number}
    for ph, at, span in (("s", start, source), ("f", end, target)):
        pid, tid = placed[id(span)]
        event = {"ph": ph, **common, "pid": pid, "tid": tid, "ts": at}
        yield event | ({"bp": "e"} if ph == "f" else {})


def nanoseconds(span: Span) -> tuple[int, int]:
    """Return begin and end; whole numbers nest as the spans do."""
    return round(span.begin * 1e9), round(span.end * 1e9)


def category(group: str) -> str:
    """Return the first word of a group."""
    return group.partition(" ")[0]


def _metadata(name: str, pid: int, tid: int, args: dict[str, Any]) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _place(group: str) -> int:
    known = (at for at, start in enumerate(ORDER) if group.startswith(start))
    return next(known, len(ORDER))


def _numbered(lane: str, number: int) -> str:
    return lane if number == 0 else f"{lane} ({number + 1})"
