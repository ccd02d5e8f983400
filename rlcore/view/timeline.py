"""The timeline of a step for the page: lanes with their spans, and the waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from rlcore.timeline.files import ORDER, Span, read_spans, recorded_steps
from rlcore.view.run import RunView

MAX_LANES = 12  # shown of a group; the others are counted
PIECES = 1500  # of a lane; shorter spans are drawn together with their neighbours
NEWEST = 400  # steps to choose from


def timeline_of(run: RunView, step: int | None) -> dict[str, Any]:
    """Return the page's drawing of a step, by default the newest.

    Raises:
        DataError: the run has no timeline of the step, or a file lies outside the run's folder.
    """
    folder = run.inside(run.directory.timeline)
    for path in folder.iterdir() if folder.is_dir() else ():
        run.inside(path)
    steps = recorded_steps(run.path)
    chosen = step if step is not None else max(steps, default=0)
    found = read_spans(run.path, chosen, chosen)
    begin, end = found.windows[chosen]
    waits = [span for span in idle_spans(found.spans) if span.begin < end and span.end > begin]
    lanes: dict[tuple[str, str], list[Span]] = {}
    for span in [*found.spans, *waits]:
        if span.kind == "X" and span.group.startswith(ORDER):
            lanes.setdefault((span.group, span.lane), []).append(span)
    groups: dict[str, list[str]] = {}
    for group, lane in sorted(lanes, key=_order):
        groups.setdefault(group, []).append(lane)
    return {
        "step": chosen,
        "steps": steps[-NEWEST:],
        "seconds": end - begin,
        "lost": found.lost,
        "groups": [
            {
                "name": group,
                "lanes": [
                    {"name": lane, "spans": _drawn(lanes[group, lane], begin, end)}
                    for lane in names[:MAX_LANES]
                ],
                "more": max(0, len(names) - MAX_LANES),
            }
            for group, names in groups.items()
        ],
        "waits": _sums(waits, begin, end),
    }


def _drawn(spans: list[Span], begin: float, end: float) -> list[dict[str, Any]]:
    """Return the spans within the step with their depth; many short spans become one."""
    piece = (end - begin) / PIECES
    found: list[dict[str, Any]] = []
    open_until: list[float] = []
    for span in sorted(spans, key=lambda one: (one.begin, -one.end)):
        while open_until and open_until[-1] <= span.begin:
            open_until.pop()
        deep = len(open_until)
        open_until.append(span.end)
        at = max(span.begin, begin) - begin
        to = min(span.end, end) - begin
        last = next((one for one in reversed(found[-4:]) if one["deep"] == deep), None)
        if last is not None and to - last["to"] < piece and last["to"] - last["at"] < piece:
            last["to"] = max(to, last["to"])
            last["count"] += 1
            continue
        args = {k: len(v) if isinstance(v, list | dict) else v for k, v in span.args.items()}
        drawn = {"name": span.name, "at": at, "to": to, "deep": deep, "count": 1, "args": args}
        found.append(drawn)
    return found


def _sums(waits: list[Span], begin: float, end: float) -> list[dict[str, Any]]:
    """Return the total of each wait between two parties, longest first."""
    sums: dict[tuple[str, str], float] = {}
    for span in waits:
        key = (span.group, span.name.removeprefix("waits for "))
        sums[key] = sums.get(key, 0.0) + min(span.end, end) - max(span.begin, begin)
    longest = sorted(sums.items(), key=lambda item: -item[1])
    return [{"waits": one, "for": other, "seconds": seconds} for (one, other), seconds in longest]


def _order(key: tuple[str, str]) -> tuple[int, str, bool, str, int]:
    """Sort groups by ORDER; in a group main lanes and idle time first, and numbers by value."""
    group, lane = key
    kind = next(at for at, start in enumerate(ORDER) if group.startswith(start))
    name, _, count = lane.rpartition(" ")
    other = lane not in ("main", "idle", "weights", "stages")
    return kind, group, other, *((name, int(count)) if count.isdecimal() else (lane, 0))


# --- idle time ------------------------------------------------------------------------------------

MIN_GAP_S = 1e-4  # shorter gaps do not count as waits
IDLE = "idle"  # the lane
NOT_OWN = ("step", "generation", "evaluation")  # phases in which the trainer itself waits
Interval = tuple[float, float]
Named = tuple[float, float, str]


def idle_spans(spans: Sequence[Span]) -> list[Span]:
    """Return a span for each wait of rank 0 or an engine, named after what it waited for.

    An engine is idle while it has no request. Rank 0 is idle while it waits for rollouts, in its
    phases `generation` and `evaluation`. Other ranks record their waits themselves.
    """
    rank0 = [span for span in spans if span.group == "rank 0" and span.lane == "main"]
    if not rank0:
        return []
    rollouts = list(_rollout_work(spans))
    found = [
        Span("X", "rank 0", IDLE, f"waits for {name}", begin, end, 0)
        for phase in rank0
        if phase.name in ("generation", "evaluation")
        for begin, end, name in named(
            [(phase.begin, phase.end)], rollouts, default="the rollout service"
        )
    ]
    begin = min(span.begin for span in rank0)
    end = max(span.end for span in rank0)
    for engine in sorted({span.group for span in spans if span.group.startswith("engine ")}):
        busy = merged((s.begin, s.end) for s in spans if s.group == engine and s.name == "request")
        reasons = [
            *(
                (s.begin, s.end, "weights")
                for s in spans
                if s.group == engine and s.lane == "weights"
            ),
            *(work for work in rollouts if work[2] != "engines"),
            *(
                (phase.begin, phase.end, f"the trainer: {phase.name}")
                for phase in rank0
                if phase.name not in NOT_OWN and not phase.name.startswith("waits")
            ),
        ]
        found += [
            Span("X", engine, IDLE, f"waits for {name}", a, b, 0)
            for a, b, name in named(gaps(busy, begin, end), reasons, default="the rollout service")
        ]
    return found


def _rollout_work(spans: Iterable[Span]) -> Iterator[Named]:
    """Yield the activities that the rollout service waited for, by priority."""
    groups: dict[str, list[Interval]] = {"engines": [], "tools": [], "rewards": []}
    for span in spans:
        is_request = span.group.startswith("engine ") and span.name == "request"
        group = "engines" if is_request else span.group
        if span.kind == "X" and group in groups:
            groups[group].append((span.begin, span.end))
    for name, intervals in groups.items():
        for begin, end in merged(intervals):
            yield begin, end, name


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as disjoint ones, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def gaps(busy: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    """Return the gaps that disjoint intervals leave between `begin` and `end`."""
    found = []
    at = begin
    for start, stop in busy:
        if start > at:
            found.append((at, min(start, end)))
        at = max(at, stop)
    found.append((at, end))
    return [(a, b) for a, b in found if b - a > MIN_GAP_S]


def named(idle: Sequence[Interval], reasons: Sequence[Named], *, default: str) -> list[Named]:
    """Split idle time by reason; of simultaneous reasons the first in the list counts.

    Args:
        idle: disjoint, in order.
    """
    found: list[Named] = []
    for begin, end in idle:
        near = [reason for reason in reasons if reason[0] < end and reason[1] > begin]
        edges = {begin, end, *(edge for a, b, _ in near for edge in (a, b) if begin < edge < end)}
        points = sorted(edges)
        for a, b in pairwise(points):
            name = next((name for x, y, name in near if x <= a and y >= b), default)
            if found and found[-1][2] == name and found[-1][1] == a:
                found[-1] = (found[-1][0], b, name)
            else:
                found.append((a, b, name))
    return [piece for piece in found if piece[1] - piece[0] > MIN_GAP_S]
