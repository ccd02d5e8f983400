"""Why draws were not trained, by a journal that grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlcore.errors import DataError
from rollout.accounting.journal_reader import History

LINES: list[dict[str, object]] = [
    {"start": 0, "prompts": [9, "x"], "max_staleness": 1},
    {"drawn": [0, 1, 2, 3, 10]},
    {"finished": [0, 1, 2]},
    {"dropped": [1], "by": "zero_variance"},
    {"consumed": [0], "step": 1},
    {"cut": 1},
    {"failed": [3], "kind": "timeout"},
    {"requeued": [2], "because": "stale"},
    {"start": 1, "prompts": [9, "x"], "max_staleness": 1},
    {"consumed": [2], "step": 2},
    {"cut": 2},
    {"failed": [3], "kind": "error"},
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "ledger.jsonl"
    found.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return found


def test_reasons_are_counted_and_grow_with_the_journal(path: Path) -> None:
    found = History(path)
    found.refresh()
    counts = {("dropped", "zero_variance"): 1, ("failed", "timeout"): 1,
              ("requeued", "stale"): 1, ("failed", "error"): 1}  # fmt: skip
    assert found.dropped_counts == counts
    assert [(e.step, e.draw, e.line) for e in found.dropped] == [
        (1, 1, 4),
        (2, 3, 7),
        (2, 2, 8),
        (3, 3, 12),
    ]
    with open(path, "a") as file:
        file.write('{"dropped": [7], "by": "mine"}\n{"failed": [8]')
    found.refresh()
    assert found.dropped_counts == counts | {("dropped", "mine"): 1}


def test_a_journal_that_was_begun_again_is_read_from_its_start(path: Path) -> None:
    found = History(path)
    found.refresh()
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES[:4]))
    found.refresh()
    assert found.dropped_counts == {("dropped", "zero_variance"): 1}
    assert [number for number, *_ in found.life(10)] == [2]


def test_nonsense_and_a_missing_file_are_named(path: Path, tmp_path: Path) -> None:
    with open(path, "a") as file:
        file.write('{"failed": "all"}\n')
    with pytest.raises(DataError, match=r"ledger\.jsonl:13"):
        History(path).refresh()
    with pytest.raises(DataError, match="no such file"):
        History(tmp_path / "none").refresh()
