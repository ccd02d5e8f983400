"""Names idle time: what the ranks and engines waited for, from what the others did meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from rlcore.timeline.files import Span

LEAST = 1e-4  # seconds; shorter gaps are no wait
IDLE = "idle"  # the lane
NOT_OWN = ("step", "generation", "evaluation")  # phases in which the trainer itself waits
Interval = tuple[float, float]
Named = tuple[float, float, str]


def idle_spans(spans: Sequence[Span]) -> list[Span]:
    """Return a span for each time in which rank 0 or an engine waited, named after whom for.

    An engine is idle while it has no request. Rank 0 is while it waits for rollouts, which is its
    phase `generation` or `evaluation`. Other ranks record their waits themselves.
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
            *((s.begin, s.end, "weights") for s in spans if s.group == engine and is_weights(s)),
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


def is_weights(span: Span) -> bool:
    """Whether a span is the time in which a publication held an engine."""
    return span.lane == "weights"


def _rollout_work(spans: Iterable[Span]) -> Iterator[Named]:
    """Yield what the rollout service waited for, the first of what happens at once first."""
    groups: dict[str, list[Interval]] = {"engines": [], "tools": [], "rewards": []}
    for span in spans:
        if span.kind != "X":
            continue
        if span.group.startswith("engine ") and span.name == "request":
            groups["engines"].append((span.begin, span.end))
        elif span.group in groups:
            groups[span.group].append((span.begin, span.end))
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
    """Return what disjoint intervals leave free between `begin` and `end`."""
    found = []
    at = begin
    for start, stop in busy:
        if start > at:
            found.append((at, min(start, end)))
        at = max(at, stop)
    found.append((at, end))
    return [(a, b) for a, b in found if b - a > LEAST]


def named(idle: Sequence[Interval], reasons: Sequence[Named], *, default: str) -> list[Named]:
    """Cut idle time where its reason changes; of reasons at once the first of the list counts.

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
    return [piece for piece in found if piece[1] - piece[0] > LEAST]
