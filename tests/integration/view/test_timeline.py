"""The timeline of a step, whose names are hostile too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import browsing
from view_runs import SCRIPT, hostile

from rlcore.timeline.recorder import Recorder

MAIN = ("rank 0", "main")
SLOT = ("engine engine-0", "slot 0")


def record(run: Path, steps: int) -> None:
    """Record steps of ten seconds: five of generation, in which a tool has a hostile name."""
    recorder = Recorder()
    recorder.open(run / "timeline", "rank_0", limit_bytes=1 << 20)
    for step in range(1, steps + 1):
        at = 10.0 * step
        recorder.add(SLOT, "request", at + 1, at + 3, groups=["1/0"], samples=[(0, 4)])
        recorder.add(("tools", "call 0"), SCRIPT, at + 3, at + 5, group=f"\u202e{SCRIPT}")
        recorder.add(MAIN, "generation", at, at + 5)
        recorder.add(MAIN, "training", at + 5, at + 10)
        recorder.add(MAIN, "step", at, at + 10)
        recorder.flush(step)


@pytest.mark.everyday
def test_a_step_shows_what_was_done_and_who_waited_for_whom(chromium: Any, tmp_path: Path) -> None:
    run = hostile(tmp_path / "runs")
    record(run, 3)
    with browsing(chromium, run) as reader:
        reader.open("runs")
        reader.press("7")
        reader.shown("timeline")
        assert reader.text("select[aria-label=Step] option:checked") == "step 3"
        waits = [line.split("\t") for line in reader.text("table tbody").splitlines()]
        assert ["engine engine-0", "the trainer: training", "5", "50 %"] in waits
        assert ["rank 0", "engines", "2", "20 %"] in waits
        assert ["engine engine-0", "tools", "2", "20 %"] in waits
        boxes = reader.page.locator(".lanes rect.span")
        assert boxes.count() == 5 + 6, "spans, and idle time"
        reader.page.locator(".lanes rect.c3").hover()
        said = reader.text("#tip")
        assert SCRIPT in said
        assert f"group: \\u202e{SCRIPT}" in said
        assert reader.page.title() == "rlcore view"
        assert reader.page.locator("main script, main img, #tip img").count() == 0
        reader.press("[")
        reader.see("svg[aria-label='Timeline of step 2']")
        reader.open("timeline?run=hostile&step=99", "error")
        assert "no timeline of these steps; it has steps 1 to 3" in reader.text("[role=alert].bad")
        assert "status of 400" in reader.complaints.pop()
