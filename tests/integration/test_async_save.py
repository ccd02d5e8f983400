"""Checkpoints in the background: training goes on, and a whole one is left whatever happens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlcore.runs.checkpoints import committed_steps
from rlcore.runs.metrics import read_metrics
from tests.integration.resume_runs import (
    UPDATES,
    Ended,
    Runs,
    assert_close_run,
    assert_same_run,
    contents,
    metrics_of,
    result_of,
)

KEEP = "checkpoint.keep=9"
ASYNC = "checkpoint.async_save=true"
# Checkpoints are saved after steps 2, 4 and 5; a model is about 30 tensors and twice as many
# moments, and there are two.
IN_STEP_2 = 20
IN_STEP_4 = 200
# The write of step 2 goes on until another thread has done something.
STALLED = {"point": "write shard", "call": IN_STEP_2, "action": "hold"}


@pytest.fixture(scope="module")
def reference(runs: Runs) -> Path:
    """Undisturbed, saved while training stood still."""
    ended = runs.train("reference", KEEP)
    assert ended.codes == [0], ended.output
    return runs.path("reference")


def finish(runs: Runs, name: str, *overrides: str, **job: Any) -> None:
    runs.finish(name, ASYNC, KEEP, *overrides, **job)


def committed(runs: Runs, name: str) -> list[int]:
    return committed_steps(runs.path(name) / "checkpoints")


def test_training_goes_on_meanwhile(runs: Runs, reference: Path) -> None:
    """Step 2 is committed late, as its write stalls, with the weights and moments of step 2."""
    until_step_3 = {"point": "metrics", "call": 4, "after": True, "action": "nothing"}  # from row 0
    ended = runs.train("stalled", ASYNC, KEEP, at=[STALLED, {**until_step_3, "while_held": True}])
    assert ended.codes == [0], ended.output
    rows = {row["step"]: row for row in read_metrics(runs.path("stalled") / "metrics.jsonl")}
    assert "time/checkpoint_write" not in rows[3]
    assert any("time/checkpoint_write" in row for row in rows.values())
    assert_same_run(runs.path("stalled"), reference)
    for step in committed(runs, "stalled"):
        assert shards(runs.path("stalled"), step) == shards(reference, step)


def shards(run: Path, step: int) -> dict[str, bytes]:
    files = contents(run / "checkpoints" / f"step_{step:06d}" / "model")
    return {name: content for name, content in files.items() if name.endswith((".distcp", ".pt"))}


@pytest.mark.parametrize(
    ("kill", "left"),
    [
        # of step 2's critic
        pytest.param({"point": "copy", "call": 2}, [], marks=pytest.mark.full),
        # of step 4, on the writing thread
        ({"point": "write shard", "call": IN_STEP_4}, [2]),
        # all is written
        pytest.param({"point": "complete", "call": 2}, [2], marks=pytest.mark.full),
        ({"point": "commit", "call": 2}, [2]),  # and sealed, not renamed
    ],
    ids=["copy", "write", "complete", "commit"],
)
def test_killed_in_a_write(
    runs: Runs, reference: Path, kill: dict[str, Any], left: list[int]
) -> None:
    name = f"killed_{kill['point'].replace(' ', '_')}"
    ended = runs.train(name, ASYNC, KEEP, at=kill)
    assert ended.killed, ended.output
    assert committed(runs, name) == left
    finish(runs, name)
    assert_same_run(runs.path(name), reference)


def test_asked_to_end_in_a_write(runs: Runs, reference: Path) -> None:
    """It ends after the step at hand, whose checkpoint waits for the one on its way."""
    ask = {"point": "update", "call": 2 * UPDATES + 1, "action": "terminate"}
    ended = runs.train("asked", ASYNC, KEEP, at=[STALLED, {**ask, "while_held": True}])
    assert ended.codes == [130], ended.output
    assert committed(runs, "asked") == [2, 3]
    assert result_of(runs.path("asked"))["status"] == "interrupted"
    finish(runs, "asked")
    # which the reference had no reason to write
    shutil.rmtree(runs.path("asked") / "checkpoints" / "step_000003")
    assert_same_run(runs.path("asked"), reference)


def test_a_disk_that_refuses_large_files(runs: Runs, reference: Path) -> None:
    """The run ends after the next step; the earlier checkpoint is intact."""
    name = "limit"
    fail = {"point": "write shard", "call": IN_STEP_4, "action": "file limit"}
    next_step = {"point": "update", "call": 4 * UPDATES + 1, "action": "wait for the write"}
    ended = runs.train(name, ASYNC, KEEP, at=[fail, next_step])
    assert_failed(
        ended,
        f"the checkpoint of step 4 could not be written: rank 0: writing {runs.path(name)}",
        "File too large",
    )
    assert "the checkpoint of step 2 is intact" in ended.output
    assert committed(runs, name) == [2]
    assert [path.name for path in (runs.path(name) / "checkpoints").iterdir()] == ["step_000002"]
    assert [row["step"] for row in metrics_of(runs.path(name))] == [0, 1, 2, 3, 4]
    finish(runs, name)
    assert_same_run(runs.path(name), reference)


def test_a_disk_that_refuses_large_files_while_training_waits(runs: Runs, reference: Path) -> None:
    ended = runs.train(
        "sync_limit", KEEP, at={"point": "write shard", "call": IN_STEP_4, "action": "file limit"}
    )
    assert_failed(ended, "the checkpoint of step 4 could not be written", "File too large")
    assert "the checkpoint of step 2 is intact" in ended.output
    finish(runs, "sync_limit")
    assert_same_run(runs.path("sync_limit"), reference)


def test_an_export_to_a_full_disk(runs: Runs, reference: Path) -> None:
    """The last checkpoint has the trained weights; resumed, the run has only its export to do."""
    name = "export"
    ended = runs.train(name, KEEP, at={"point": "write export", "call": 1, "action": "disk full"})
    assert_failed(ended, f"the export to {runs.path(name) / 'hf'} failed", "No space")
    assert "--resume" in ended.output
    assert not (runs.path(name) / "hf").exists()
    assert committed(runs, name) == [2, 4, 5]
    finish(runs, name)
    assert_same_run(runs.path(name), reference)


@pytest.mark.parametrize(
    ("how", "found_by"),
    [
        (ASYNC, "rank 1: writing"),
        pytest.param("checkpoint.async_save=false", "writing", marks=pytest.mark.full),
    ],
    ids=["async", "waiting"],
)
def test_a_rank_that_cannot_write_is_named(runs: Runs, how: str, found_by: str) -> None:
    """Every rank says what is intact: any may be the first to tell why the run ends."""
    name = f"rank_1_{how[-4:]}"
    ended = runs.train(
        name, how, "policy.parallel.tensor=2", "cluster.launcher=torchrun", ranks=2,
        at={"point": "write shard", "call": IN_STEP_2, "rank": 1, "action": "disk full"},
    )  # fmt: skip
    assert set(ended.codes) == {1}
    said = [line for line in ended.output.splitlines() if line.startswith("rlcore: ")]
    assert said
    for line in said:
        assert f"the checkpoint of step 2 could not be written: {found_by}" in line
        assert "No space left on device" in line
        assert "there is no earlier checkpoint" in line
    assert committed(runs, name) == []


@pytest.mark.full
def test_two_ranks_with_a_distributed_optimizer(runs: Runs) -> None:
    """All gathers come before the thread starts: killed in a write, the run ends as without."""
    options = (
        "cluster.launcher=torchrun", "policy.optimizer.distributed=true",
        "critic.optimizer.distributed=true", "policy.optimizer.eps=1e-2",
        "critic.optimizer.eps=1e-2",
    )  # fmt: skip
    ended = runs.train("calm", "policy.optimizer.eps=1e-2", "critic.optimizer.eps=1e-2")
    assert ended.codes == [0], ended.output
    ended = runs.train(
        "distributed",
        ASYNC,
        *options,
        ranks=2,
        # each of the two ranks writes about half
        at={"point": "write shard", "call": IN_STEP_4 // 2, "rank": 0},
    )
    assert ended.killed, ended.output
    assert committed(runs, "distributed") == [2]
    finish(runs, "distributed", *options, ranks=2)
    assert_close_run(runs.path("distributed"), runs.path("calm"), tolerance=1e-5)


def assert_failed(ended: Ended, *words: str) -> None:
    assert ended.codes == [1], ended.output
    assert "Traceback" not in ended.output
    message = ended.output.strip().splitlines()[-1]
    for word in words:
        assert word in message, message
