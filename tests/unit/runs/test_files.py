from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from rlcore.runs import files
from rlcore.runs.files import BLOCK, cut_torn_line


@pytest.mark.parametrize("block", [1, 2, 3, 100])
@pytest.mark.parametrize(("content", "left"), [
    ("", ""), ("torn", ""), ("a\n", "a\n"), ("\n", "\n"), ("\ntorn", "\n"),
    ("a\nbcd\n", "a\nbcd\n"), ("a\nbcd\ntorn", "a\nbcd\n"),
])  # fmt: skip
def test_what_has_no_newline_at_its_end_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, left: str, block: int
) -> None:
    monkeypatch.setattr(files, "BLOCK", block)
    path = tmp_path / "lines"
    path.write_text(content)
    cut_torn_line(path)
    assert path.read_text() == left


def test_it_costs_no_memory_for_what_stands_before(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    size = 1 << 28
    with open(path, "wb") as file:
        file.seek(size)  # a hole: nothing is on the disk
        file.write(b"\ntorn")
    tracemalloc.start()
    try:
        cut_torn_line(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size == size + 1
    assert peak < 4 * BLOCK
