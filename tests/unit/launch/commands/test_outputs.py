"""Where commands write: what cannot be written is refused before anything else is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore import cli

GIVEN = ("run.name=x", "model.path=m", "data.paths=d.jsonl", "training.steps=1")
SCORED = "evaluation.paths=d.jsonl"


def test_an_evaluation_says_so_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for output in (tmp_path / "none" / "scores.json", tmp_path):
        assert cli.main(["eval", *GIVEN, SCORED, "--output", str(output)]) == 2
        assert f"--output: {output} cannot be written" in capsys.readouterr().err


def test_an_export_does_not_take_a_file_for_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert cli.main(["export", str(tmp_path / "run"), str(file)]) == 2
    assert f"{file} is not a folder" in capsys.readouterr().err
    assert file.read_text() == "mine"
