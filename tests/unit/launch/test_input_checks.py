"""What the launcher refuses before it starts anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlcore.config import Config
from rlcore.errors import DataError, UserError
from rlcore.launch import input_checks


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of prompts. The model is not looked at."""
    monkeypatch.setattr(input_checks, "check_model", lambda *_, **__: None)
    monkeypatch.setattr(input_checks, "check_context", lambda *_: None)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n')
    return path


def check(rows: Path, *, training: Any = None, **sections: Any) -> None:
    given = {
        "run": {"name": "a", "dir": str(rows.parent / "runs")},
        "model": {"path": str(rows.parent)},
        "data": {"paths": [str(rows)]},
        "training": {"steps": 1, **(training or {})},
        "reward": {"parts": {"a": {"function": "exact_match"}}},
    }
    config = Config.model_validate({**given, **sections})
    input_checks.check_input(config, 1, resume=False, overwrite=False)


def test_files_that_are_not_there(rows: Path) -> None:
    missing = str(rows.with_name("missing.jsonl"))
    check(rows, evaluation={"paths": [str(rows)]})
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        check(rows, data={"paths": [missing]})
    with pytest.raises(DataError, match=r"missing\.jsonl"):
        check(rows, evaluation={"paths": [missing]})
    with pytest.raises(UserError, match=r"policy\.checkpoint: .*missing"):
        check(rows, policy={"checkpoint": str(rows.with_name("missing"))})
    with pytest.raises(UserError, match=r"training\.replay_from: .*missing"):
        check(rows, training={"replay_from": str(rows.with_name("missing"))})


def test_a_run_that_exists_already(rows: Path) -> None:
    folder = rows.parent / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {name: a}\n")
    with pytest.raises(UserError, match="runs/a"):
        check(rows)
