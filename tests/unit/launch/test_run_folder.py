"""The result of a run whose trainer cannot write it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlcore.errors import RunFailed
from rlcore.launch.run_folder import OpenRun, conclude
from rlcore.runs.checkpoints import CheckpointStore
from rlcore.runs.directory import RunDirectory


def test_the_result_counts_the_steps_of_the_log(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "a")
    directory.metrics_path.write_text('{"step": 1}\n{"step": 2}\n')
    conclude(directory, "failed", "a reason")
    assert directory.read_result() == {"status": "failed", "steps": 2, "reason": "a reason"}


def test_damaged_metrics_do_not_hide_what_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = RunDirectory.create(tmp_path, "a")
    directory.metrics_path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    OpenRun(directory, CheckpointStore(directory.checkpoints), None).end_with(
        RunFailed("the first")
    )
    assert "result.json could not be written" in caplog.text
    assert "metrics.jsonl:2: not JSON" in caplog.text
