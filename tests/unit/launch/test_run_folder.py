"""The result of a run whose trainer cannot write it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlcore.errors import RunFailed, UserError
from rlcore.launch.run_folder import (
    OpenRun,
    conclude,
    conclude_unless_written,
    describe_run,
    result_mark,
)
from rlcore.runs.checkpoints import CheckpointStore
from rlcore.runs.directory import RunDirectory
from tests.configs import small_config


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


def refused(directory: RunDirectory) -> None:
    """Bad input that is found once the run's folder is open."""
    OpenRun(directory, CheckpointStore(directory.checkpoints), None).end_with(UserError("no"))


def test_bad_input_frees_a_new_name(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "a")
    (directory.logs / "rank_0.log").write_text("x")
    refused(directory)
    assert [*tmp_path.iterdir()] == []


def test_bad_input_leaves_what_no_run_writes(tmp_path: Path) -> None:
    """Also behind a link, as where runs are on another disk. `--overwrite` promises that."""
    there = tmp_path / "another disk"
    there.mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").symlink_to(there)
    directory = RunDirectory.create(tmp_path / "runs", "a")
    (there / "notes.md").write_text("mine")
    refused(directory)
    assert (there / "notes.md").read_text() == "mine"
    assert not directory.logs.exists()
    (there / "notes.md").unlink()
    directory = RunDirectory(directory.path)
    directory.logs.mkdir()
    refused(directory)
    assert directory.path.is_symlink()
    assert there.is_dir(), "a link without its folder could not be used again"
    assert not directory.logs.exists()


def test_a_folder_that_cannot_be_removed_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = RunDirectory.create(tmp_path, "a")

    def busy(self: RunDirectory) -> None:
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(RunDirectory, "discard", busy)
    refused(directory)
    assert "a was not removed: [Errno 39] Directory not empty" in caplog.text


def test_only_a_result_of_this_start_counts(tmp_path: Path) -> None:
    """A killed rank 0 leaves that of an earlier start, on a server with a clock of its own."""
    config = small_config(run={"name": "a", "dir": str(tmp_path)})
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


def test_the_status_of_a_run_tells_its_step_its_end_and_its_engines(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config\.yaml; expected the folder of a run"):
        list(describe_run(tmp_path))
    directory = RunDirectory.create(tmp_path, "a")
    directory.write_config({})
    directory.close()
    [line] = describe_run(directory.path)
    assert line.startswith("a: step 0, is held by no process: it was killed")
    directory.metrics_path.write_text('{"step": 1}\n{"step": 7}\n')
    row = {"engine": "engine-0", "url": None, "state": "serving", "version": 8}
    by_url = {**row, "engine": "b", "url": "http://b:1"}
    rows = [{"requests": 3, "restarts": 1, **one} for one in (row, by_url)]
    directory.engines_path.write_text(json.dumps(rows))
    assert list(describe_run(directory.path))[1:] == [
        "  engine-0: serving, version 8, 3 requests, 1 restarts",
        "  b at http://b:1: serving, version 8, 3 requests, 1 restarts",
    ]
    directory.write_result("completed", 7)
    assert list(describe_run(directory.path)) == ["a: step 7, has ended: completed"]


def test_the_status_of_a_run_that_goes_on_names_its_process(tmp_path: Path) -> None:
    held = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time; from rlcore.runs.directory import RunDirectory;"
            "run = RunDirectory.create(sys.argv[1], 'a'); run.write_config({}); print(flush=True);"
            "time.sleep(60)",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert held.stdout is not None
        held.stdout.readline()
        assert next(describe_run(tmp_path / "a")).startswith(
            f"a: step 0, is running (pid {held.pid} on"
        )
    finally:
        held.kill()
        held.wait()
