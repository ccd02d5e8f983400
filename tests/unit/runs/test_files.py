from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from rlcore.runs import files
from rlcore.runs.files import BLOCK, cut_torn_line, rotate_logs, write_atomic


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


def test_what_is_written_aside_follows_no_link(tmp_path: Path) -> None:
    """Its name can be foretold, and another user may have put a link there, as in /tmp."""
    treasure = tmp_path / "treasure"
    treasure.write_text("old")
    (tmp_path / ".urls.json.tmp").symlink_to(treasure)
    write_atomic(tmp_path / "urls.json", b"new")
    assert treasure.read_text() == "old"
    assert (tmp_path / "urls.json").read_bytes() == b"new"
    assert not (tmp_path / "urls.json").is_symlink()


def test_what_is_written_aside_is_made_by_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with the sticky bit nobody can remove what another user has put there."""
    aside = tmp_path / ".urls.json.tmp"
    aside.write_text("theirs")
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "urls.json", b"new")
    assert aside.read_text() == "theirs"


def test_a_file_has_the_mode_that_was_asked_for(tmp_path: Path) -> None:
    write_atomic(tmp_path / "secret", b"x", mode=0o600)
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600


def test_a_log_that_has_grown_is_moved_aside_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process keeps the file open."""
    monkeypatch.setattr(files, "LOG_BYTES", 10)
    small = tmp_path / "rank_0.log"
    small.write_text("few")
    path = tmp_path / "engine_0.log"
    with path.open("a", buffering=1) as log:
        log.write("many and old\n")
        rotate_logs(tmp_path)
        log.write("new\n")
        assert path.read_text() == "new\n"
        assert (tmp_path / "engine_0.log.1").read_text() == "many and old\n"
        log.write("newer and many\n")
        rotate_logs(tmp_path)
    assert path.read_text() == ""
    assert (tmp_path / "engine_0.log.1").read_text() == "new\nnewer and many\n"
    assert small.read_text() == "few"
    assert len(list(tmp_path.iterdir())) == 3


def test_a_log_that_cannot_be_moved_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "LOG_BYTES", 1)
    (tmp_path / "engine_0.log").write_text("many")
    (tmp_path / "engine_0.log.1").mkdir()
    rotate_logs(tmp_path)
    assert "could not be moved aside" in caplog.text
    assert os.path.getsize(tmp_path / "engine_0.log") == 4
