"""`rlcore trace RUN`: the timeline of a run in Chrome's trace-event format, for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlcore.errors import DataError
from rlcore.timeline.chrome import write_trace
from rlcore.timeline.idle import idle_spans
from rlcore.timeline.read import Span, read_spans, recorded_steps
from rlcore.tracking.format import duration

NEWEST = 10  # steps, by default
FILE = "trace.json.gz"
MOST_WAITS = 5  # that are printed


def write_timeline(
    run: Path, output: Path | None, *, first: int | None, last: int | None
) -> Iterator[str]:
    """Write the trace, and yield what it holds and the longest waits.

    Args:
        first, last: steps; None for the newest `NEWEST`.

    Raises:
        DataError: the run has no timeline of these steps.
    """
    if not run.is_dir():
        raise DataError(f"{run} is no folder; expected the folder of a run, as runs/NAME")
    if first is None:
        first = next(iter(recorded_steps(run)[-NEWEST:]), None)
    timeline = read_spans(run, first, last)
    path = output or run / FILE
    count = write_trace(timeline, path, title=run.name)
    steps = list(timeline.windows)
    yield (
        f"{path}: steps {steps[0]} to {steps[-1]}, {count} events,"
        f" {path.stat().st_size / 1e6:.1f} MB: open it in https://ui.perfetto.dev"
    )
    if timeline.lost:
        yield f"{timeline.lost} records are missing: there was no room for them in memory"
    yield from _waits(idle_spans(timeline.spans))


def _waits(spans: list[Span]) -> Iterator[str]:
    """Yield the longest sums of waits, by who waited for whom."""
    sums: dict[tuple[str, str], float] = {}
    for span in spans:
        key = (span.group, span.name)
        sums[key] = sums.get(key, 0.0) + span.seconds
    for (group, name), seconds in sorted(sums.items(), key=lambda item: -item[1])[:MOST_WAITS]:
        yield f"  {group} {name}: {duration(seconds)}"
