"""Idle time is named after whom it waited for."""

from __future__ import annotations

from typing import Any

from rlcore.timeline.files import Span
from rlcore.view.timeline import idle_spans


def span(group: str, lane: str, name: str, begin: float, end: float, /, **args: Any) -> Span:
    return Span("X", group, lane, name, begin, end, 1, args)


def request(lane: str, begin: float, end: float, group: str) -> Span:
    return span("engine a", lane, "request", begin, end, groups=[group], samples=[[0, 4]])


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


def test_idle_time_is_named_after_whom_it_waited_for() -> None:
    found = [(s.group, s.name, s.begin, s.end) for s in idle_spans(STEP)]
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
