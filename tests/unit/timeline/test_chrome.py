from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlcore.timeline.chrome import trace_events, write_trace
from rlcore.timeline.idle import idle_spans
from rlcore.timeline.read import Span, Timeline
from tests.trace_rules import check_events, names_of, read_trace


def span(group: str, lane: str, name: str, begin: float, end: float, /, **args: Any) -> Span:
    return Span("X", group, lane, name, begin, end, 1, args)


def request(lane: str, begin: float, end: float, group: str, first: int = 0, n: int = 4) -> Span:
    return span("engine a", lane, "request", begin, end, groups=[group], samples=[[first, n]])


STEP = [
    span("rank 0", "main", "step", 0.0, 10.0),
    span("rank 0", "main", "generation", 0.0, 6.0),
    span("rank 0", "main", "training", 6.0, 9.0),
    span("rank 0", "main", "publish", 9.0, 10.0),
    request("slot 0", 0.5, 3.0, "7/1"),
    request("slot 1", 0.5, 4.0, "7/2"),
    span("rewards", "worker 0", "math", 3.0, 3.5, group="7/1", sample=0),
    span("rewards", "worker 1", "math", 4.0, 5.5, group="7/2", sample=3),
    span("publication", "stages", "version 3", 9.0, 9.9, publication=1, engines=1),
    span("publication", "stages", "pause", 9.0, 9.2),
    span("engine a", "weights", "version 3", 9.05, 9.9, publication=1),
]


def timeline(spans: list[Span]) -> Timeline:
    return Timeline(sorted(spans, key=lambda s: (s.begin, -s.end)), 1e9, {1: (0.0, 10.0)})


def arrows(events: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """Name, target lane, begin and end of each flow."""
    lanes = names_of(events)
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    return [
        (e["name"], "/".join(lanes[ends[e["id"]]["pid"], ends[e["id"]]["tid"]]),
         round(e["ts"] / 1e6, 5), ends[e["id"]]["ts"] / 1e6)
        for e in events
        if e["ph"] == "s"
    ]  # fmt: skip


def test_a_step_becomes_a_valid_trace_with_its_arrows(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    assert write_trace(timeline(STEP), path, title="run") > len(STEP)
    events = read_trace(path)
    assert arrows(events) == [
        ("scored", "rewards/worker 0", 3.0, 3.0),
        ("scored", "rewards/worker 1", 4.0, 4.0),
        ("weights", "engine a/weights", 9.05, 9.05),
    ]
    groups = {group for group, _ in names_of(events).values()}
    assert groups == {"rank 0", "engine a", "rewards", "publication"}


def test_a_reward_follows_the_last_request_that_made_its_sample() -> None:
    spans = [
        request("slot 0", 0.0, 1.0, "7/1", first=0, n=1),
        request("slot 1", 0.0, 2.0, "7/1", first=1, n=1),
        request("slot 0", 1.5, 3.0, "7/1", first=0, n=1),
        request("slot 2", 0.0, 3.5, "8/1", first=1, n=1),  # of another set of prompts
        span("rewards", "worker 0", "math", 4.0, 5.0, group="7/1", sample=1),
        span("rewards", "worker 1", "math", 4.0, 5.0, group="7/1", sample=0),
        span("rewards", "worker 2", "math", 4.0, 5.0, group="9/1", sample=0),
    ]
    events = trace_events(timeline(spans))
    check_events(events)
    assert arrows(events) == [
        ("scored", "rewards/worker 0", 2.0, 4.0),
        ("scored", "rewards/worker 1", 3.0, 4.0),
    ]


def test_spans_that_cut_each_other_lie_on_lanes_of_their_own() -> None:
    spans = [
        span("engine a", "slot 0", "one", 0.0, 2.0),
        span("engine a", "slot 0", "two", 1.0, 3.0),
        span("engine a", "slot 0", "inner", 1.0, 1.5),
        span("engine a", "slot 0", "three", 2.0, 2.5),
    ]
    events = trace_events(timeline(spans))
    check_events(events)
    lanes = names_of(events)
    placed = {e["name"]: lanes[e["pid"], e["tid"]][1] for e in events if e["ph"] == "X"}
    assert placed == {"one": "slot 0", "two": "slot 0 (2)", "inner": "slot 0", "three": "slot 0"}


def test_idle_time_is_named_after_whom_it_waited_for() -> None:
    found = [(s.group, s.name, s.begin, s.end) for s in idle_spans(timeline(STEP).spans)]
    assert found == [
        ("rank 0", "waits for the rollout service", 0.0, 0.5),
        ("rank 0", "waits for engines", 0.5, 4.0),
        ("rank 0", "waits for rewards", 4.0, 5.5),
        ("rank 0", "waits for the rollout service", 5.5, 6.0),
        ("engine a", "waits for the rollout service", 0.0, 0.5),
        ("engine a", "waits for rewards", 4.0, 5.5),
        ("engine a", "waits for the rollout service", 5.5, 6.0),
        ("engine a", "waits for the trainer: training", 6.0, 9.0),
        ("engine a", "waits for the trainer: publish", 9.0, 9.05),
        ("engine a", "waits for weights", 9.05, 9.9),
        ("engine a", "waits for the trainer: publish", 9.9, 10.0),
    ]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda events: events[0].pop("args"), "args"),
        (lambda events: events.reverse(), "not in order"),
        (lambda events: events.pop(0), "process"),
        (lambda events: events[-1].update(ph="s", id=1, bp="e"), "ph"),
        (lambda events: events.remove(next(e for e in events if e["ph"] == "f")), "flow"),
        (lambda events: next(e for e in events if e["name"] == "request").update(dur=2.6e6), "cut"),
    ],
)
def test_the_rules_see_what_is_wrong(change: Any, problem: str) -> None:
    events = trace_events(timeline([*STEP, request("slot 0", 3.0, 3.2, "7/9")]))
    check_events(events)
    change(events)
    with pytest.raises(AssertionError):
        check_events(events)
