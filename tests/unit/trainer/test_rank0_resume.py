"""Rank 0's part of a checkpoint, and what it does with the run's folder on a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from rlcore.config import Config
from rlcore.data.batch import StepRollouts
from rlcore.data.sample import Sample
from rlcore.interfaces import RolloutSource
from rlcore.launch.run_folder import conclude
from rlcore.runs.checkpoints import Checkpoint, CheckpointStore, latest_checkpoint
from rlcore.runs.directory import RunDirectory
from rlcore.runs.metrics import MetricsFile, read_metrics
from rlcore.tracking.base import BaseTracker
from rlcore.trainer.rank0 import CONTINUE, RankZero


class Source:
    """Hands out the same samples at each step."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def next_step(self, step: int) -> StepRollouts:
        return StepRollouts(self.samples, {}, epoch=0.0, snapshot={})

    def snapshot(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any] | None) -> None: ...

    def keep_ledger(self, path: Path) -> None: ...


Open = Callable[[Checkpoint | None], RankZero]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "a")


@pytest.fixture
def open_rank0(directory: RunDirectory, make_sample: Callable[..., Sample]) -> Open:
    config = Config.model_validate(
        {
            "run": {"name": "a"},
            "model": {"path": "model"},
            "data": {"paths": "train.jsonl"},
            "training": {"steps": 9},
        }
    )

    def open_rank0(found: Checkpoint | None) -> RankZero:
        return RankZero(
            config,
            source=cast(RolloutSource, Source([make_sample()])),
            tracker=BaseTracker(),
            directory=directory,
            checkpoints=CheckpointStore(directory.checkpoints),
            total_steps=9,
            interrupted=lambda: False,
            newest_version=lambda: 8,
            resume_from=found,
        )

    return open_rank0


def saved(rank0: RankZero, step: int, version: int) -> Checkpoint:
    rank0.generate(step)
    rank0.build_batch(step, version)
    rank0.begin_checkpoint(step)
    rank0.checkpoints.commit(step)
    found = latest_checkpoint(rank0.checkpoints.folder)
    assert found is not None
    return found


def test_a_checkpoint_knows_the_newest_version(open_rank0: Open) -> None:
    """Published after its step was trained: the journal of versions may be lost."""
    assert saved(open_rank0(None), 4, version=6).state["version"] == 8


def test_a_run_that_goes_on_has_no_metrics_of_later_steps(
    open_rank0: Open, directory: RunDirectory
) -> None:
    metrics = MetricsFile(directory.metrics_path)
    for step in range(7):
        metrics.append(step, {})
    rank0 = open_rank0(saved(open_rank0(None), 4, version=6))
    rank0.restore()
    assert [row["step"] for row in read_metrics(directory.metrics_path)] == [*range(7)], (
        "it may still be refused"
    )
    assert rank0.begin() == f"4 {CONTINUE}"
    assert [row["step"] for row in read_metrics(directory.metrics_path)] == [*range(5)]
    conclude(directory, "failed", "killed before its first step")
    assert (directory.read_result() or {})["steps"] == 4


def test_a_run_that_begins_again_has_none(open_rank0: Open, directory: RunDirectory) -> None:
    """Nor an evaluation before training: that comes again."""
    metrics = MetricsFile(directory.metrics_path)
    for step in range(2):
        metrics.append(step, {})
    rank0 = open_rank0(None)
    rank0.restore()
    assert rank0.begin() == f"0 {CONTINUE}"
    assert read_metrics(directory.metrics_path) == []
