"""The timeline of one step for the page: lanes with their spans, and who waited for whom."""

from __future__ import annotations

from typing import Any

from rlcore.timeline.files import ORDER, Span, read_spans, recorded_steps
from rlcore.timeline.idle import idle_spans
from rlcore.view.run import RunView

MAX_LANES = 12  # of a group; the others are counted
PIECES = 1500  # of a lane; what is shorter than one is drawn with its neighbour
NEWEST = 400  # steps to choose from


def timeline_of(run: RunView, step: int | None) -> dict[str, Any]:
    """Return what the page draws of a step, by default the newest.

    Raises:
        DataError: the run has no timeline of the step, or a file of it lies elsewhere.
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
    for group, lane in sorted(lanes, key=lambda key: (_place(key[0]), key[0], _natural(key[1]))):
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
    """Return the spans within the step, with how deep they nest; many short ones as one."""
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
        args = {
            name: len(value) if isinstance(value, list | dict) else value
            for name, value in span.args.items()
        }
        found.append(
            {"name": span.name, "at": at, "to": to, "deep": deep, "count": 1, "args": args}
        )
    return found


def _sums(waits: list[Span], begin: float, end: float) -> list[dict[str, Any]]:
    """Return who waited for whom, the longest first."""
    sums: dict[tuple[str, str], float] = {}
    for span in waits:
        key = (span.group, span.name.removeprefix("waits for "))
        sums[key] = sums.get(key, 0.0) + min(span.end, end) - max(span.begin, begin)
    longest = sorted(sums.items(), key=lambda item: -item[1])
    return [{"who": who, "whom": whom, "seconds": seconds} for (who, whom), seconds in longest]


def _place(group: str) -> int:
    return next(at for at, start in enumerate(ORDER) if group.startswith(start))


def _natural(lane: str) -> tuple[bool, str, int]:
    """Order main lanes and idle time first, and numbers as numbers."""
    name, _, count = lane.rpartition(" ")
    first = lane in ("main", "idle", "weights", "stages")
    return (not first, name, int(count)) if count.isdecimal() else (not first, lane, 0)
