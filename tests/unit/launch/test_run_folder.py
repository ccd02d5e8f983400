"""The result of a run whose trainer cannot write it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rlcore.config import Config
from rlcore.errors import RunFailed
from rlcore.launch.run_folder import (
    OpenRun,
    conclude,
    conclude_unless_written,
    result_mark,
)
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


def test_only_a_result_of_this_start_counts(tmp_path: Path) -> None:
    """A killed rank 0 leaves that of an earlier start, on a server with a clock of its own."""
    config = Config.model_validate(
        {
            "run": {"name": "a", "dir": str(tmp_path)},
            "model": {"path": "model"},
            "data": {"paths": "train.jsonl"},
            "training": {"steps": 9},
        }
    )
    assert result_mark(config) is None
    directory = RunDirectory.create(tmp_path, "a")
    directory.write_result("completed", 3)
    future = time.time() + 10_000
    os.utime(directory.result_path, (future, future))
    earlier = result_mark(config)
    conclude_unless_written(config, "failed", "killed", earlier=earlier)
    assert directory.read_result() == {"status": "failed", "steps": 0, "reason": "killed"}
    directory.write_result("completed", 9)
    os.utime(directory.result_path, (1000, 1000))
    conclude_unless_written(config, "failed", "killed", earlier=earlier)
    result = directory.read_result()
    assert result is not None
    assert result["status"] == "completed"
