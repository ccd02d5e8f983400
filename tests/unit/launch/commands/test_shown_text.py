"""What commands print of runs does not steer the terminal, and where they do not write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore import cli
from rlcore.data.sample import Sample
from rlcore.launch.commands import compare, engine, evaluate, ledger
from tests.configs import small_config

TEXT = "\x1b[2Jgone"
SHOWN = r"\x1b[2Jgone"
GIVEN = ("run.name=x", "model.path=m", "data.paths=d.jsonl", "training.steps=1")
SCORED = "evaluation.paths=d.jsonl"


def read(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr().out
    assert "\x1b" not in text
    return text


def test_lines_of_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cli.COMMANDS, "metrics", lambda _: [TEXT, "and more"])
    assert cli.main(["metrics"]) == 0
    assert read(capsys) == f"{SHOWN}\nand more\n"


def test_answers_of_an_evaluation(
    make_sample: Callable[..., Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate._show(small_config(), {"eval/score": 0.5}, [make_sample(response_text=TEXT)], None)
    assert SHOWN in read(capsys)


def test_what_happened_to_a_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledger, "read_journal", lambda _: None)
    monkeypatch.setattr(ledger, "life_of", lambda *_: ["draw 3", TEXT])
    ledger.show_ledger(tmp_path, draw=3, as_json=False, recordings=False)
    assert read(capsys) == f"draw 3\n{SHOWN}\n"


def test_the_summary_of_a_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledger, "audit", lambda *_, **__: SimpleNamespace(contradictions=[TEXT]))
    monkeypatch.setattr(ledger, "describe", lambda found: found.contradictions)
    ledger.show_ledger(tmp_path, draw=None, as_json=False, recordings=False)
    assert read(capsys) == f"{SHOWN}\n"


def test_words_of_an_engine_that_ended(capsys: pytest.CaptureFixture[str]) -> None:
    engine._say(TEXT)
    assert capsys.readouterr().err == f"{SHOWN}\n"


def test_differences_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("training: {steps: 1}\n")
    monkeypatch.setattr(compare, "read_metrics", lambda _: [])
    monkeypatch.setattr(compare, "_described_metrics", lambda *_: [TEXT])
    compare.compare_runs(tmp_path, tmp_path, tolerance=0.0)
    assert read(capsys).splitlines()[-1] == SHOWN


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
