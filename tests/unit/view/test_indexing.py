"""The index of a run, looked at by the page and by the thread that indexes."""

from __future__ import annotations

import threading
from pathlib import Path

from rlcore.view.indexing import RunIndex


def test_a_page_waits_until_recordings_were_looked_at(tmp_path: Path) -> None:
    """It would see the steps of one moment and their places of another."""
    looking = threading.Event()
    may_go_on = threading.Event()

    def recordings() -> dict[int, Path]:
        looking.set()
        assert may_go_on.wait(30)
        return {}

    index = RunIndex(
        tmp_path / "own", tmp_path / "cache", recordings=recordings, inside=lambda path: path
    )
    lacking: list[list[int]] = []
    spans: list[list[object]] = []
    indexer = threading.Thread(target=lambda: lacking.append(index.lacking()))
    page = threading.Thread(target=lambda: spans.append([*index.spans_between(0, 9)]))
    indexer.start()
    assert looking.wait(30)
    page.start()
    page.join(0.2)
    waited = page.is_alive()
    may_go_on.set()
    for thread in (indexer, page):
        thread.join(30)
    assert waited
    assert (lacking, spans) == ([[]], [[]])
