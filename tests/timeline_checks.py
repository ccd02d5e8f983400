"""Checks the timeline of a run against the trace-event format and against its metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlcore.timeline.files import Span, read_spans
from rlcore.tracking.report import NOT_PHASES
from rlcore.view.timeline import merged
from tests.trace_rules import names_of, read_trace

NEAR = 0.02  # of a sum of spans to its metric, relative
LEAST_S = 0.002  # of a phase that is compared


def check_timeline(
    folder: Path, rows: Mapping[int, Mapping[str, Any]], *, lockstep: bool = False
) -> dict[str, list[Span]]:
    """Check the timeline of a run whose metrics are `rows`, by step; return its spans by group.

    Args:
        lockstep: the time of the engines is that of their requests.
    """
    timeline = read_spans(folder)
    assert timeline.lost == 0
    assert [step for step in timeline.windows if step > 0] == [step for step in rows if step > 0]
    groups: dict[str, list[Span]] = {}
    for span in timeline.spans:
        groups.setdefault(span.group, []).append(span)
    traces = [read_trace(path) for path in (folder / "timeline").iterdir()]
    assert groups.keys() <= {group for trace in traces for group, _ in names_of(trace).values()}
    engines = [group for group in groups if group.startswith("engine ")]
    for step, row in rows.items():
        _check_sums(timeline.spans, step, row)
    if lockstep:
        _check_engine_time(groups, engines, rows)
    return groups


def _check_sums(spans: list[Span], step: int, row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        phase = name.removeprefix("time/")
        if phase == name or (name in NOT_PHASES and phase != "step"):
            continue
        total = sum(
            span.seconds
            for span in spans
            if (span.group, span.lane, span.name, span.step) == ("rank 0", "main", phase, step)
        )
        assert total == pytest.approx(value, rel=NEAR, abs=LEAST_S * NEAR), f"{name} of step {step}"


def _check_engine_time(
    groups: Mapping[str, list[Span]], engines: list[str], rows: Mapping[int, Mapping[str, Any]]
) -> None:
    phases = {(s.step, s.name): s for s in groups["rank 0"] if s.lane == "main"}
    for step, row in rows.items():
        if "time/engine" in row:
            phase = phases[step, "generation"]
            requests = merged(
                (span.begin, span.end)
                for group in engines
                for span in groups[group]
                if span.name == "request" and phase.begin <= span.begin < phase.end
            )
            total = sum(end - begin for begin, end in requests)
            assert total == pytest.approx(row["time/engine"], abs=1e-4), step  # the same readings
