"""Rank 0's part of a checkpoint, and what it does with the run's folder on a resume."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from rlcore.config import Config
from rlcore.config.evaluation_sets import set_of
from rlcore.data.batch import StepRollouts
from rlcore.data.sample import Sample
from rlcore.errors import ConfigError, UserError
from rlcore.interfaces import RolloutSource
from rlcore.launch.run_folder import conclude, find_checkpoint
from rlcore.runs import files, rollouts
from rlcore.runs.checkpoints import (
    Best,
    Checkpoint,
    CheckpointStore,
    committed_steps,
    latest_checkpoint,
    read_best,
)
from rlcore.runs.directory import RunDirectory
from rlcore.runs.files import remove_tree
from rlcore.runs.metrics import MetricsFile, read_metrics
from rlcore.runs.rollouts import write_rollouts
from rlcore.tracking.base import BaseTracker
from rlcore.trainer.rank0 import CONTINUE, RankZero


class Source:
    """Hands out the same samples at each step."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.scores: dict[str, float] = {}

    def next_step(self, step: int) -> StepRollouts:
        return StepRollouts(self.samples, {}, epoch=0.0, snapshot={})

    def evaluate(self, sets: Sequence[str]) -> tuple[dict[str, float], list[Sample]]:
        return {name: value for name, value in self.scores.items() if set_of(name) in sets}, []

    def snapshot(self) -> dict[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any] | None) -> None: ...

    def keep_ledger(self, path: Path) -> None: ...


class Notes(BaseTracker):
    """Remembers the lines that people would see."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


Open = Callable[..., RankZero]
HELD_OUT = {"paths": "held_out.jsonl", "sets": {"hard": {"paths": "hard.jsonl", "k": [1]}}}
PASS = {"best": {"metric": "eval/hard/pass@1"}}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path, "a")


@pytest.fixture
def open_rank0(directory: RunDirectory, make_sample: Callable[..., Sample]) -> Open:
    def open_rank0(found: Checkpoint | None, **sections: Any) -> RankZero:
        config = Config.model_validate(
            {
                "run": {"name": "a"},
                "model": {"path": "model"},
                "data": {"paths": "train.jsonl"},
                "training": {"steps": 9},
                **sections,
            }
        )
        return RankZero(
            config,
            source=cast(RolloutSource, Source([make_sample()])),
            tracker=Notes(),
            directory=directory,
            checkpoints=CheckpointStore(directory.checkpoints, keep=1),
            total_steps=9,
            interrupted=lambda: False,
            newest_version=lambda: 8,
            resume_from=found,
        )

    return open_rank0


def resumed(rank0: RankZero) -> RankZero:
    rank0.restore()
    rank0.begin()
    return rank0


def saved(rank0: RankZero, step: int, version: int) -> Checkpoint:
    rank0.generate(step)
    rank0.build_batch(step, version)
    rank0.begin_checkpoint(step)
    rank0.commit_checkpoint(step)
    found = latest_checkpoint(rank0.checkpoints.folder)
    assert found is not None
    return found


def test_a_checkpoint_knows_the_newest_version(open_rank0: Open) -> None:
    """Published after its step was trained: the journal of versions may be lost."""
    assert saved(open_rank0(None), 4, version=6).state["version"] == 8


def recorded(rank0: RankZero, step: int) -> None:
    """Hand the recorder the samples of `step`, trained with advantages of 0."""
    batch = rank0.build_batch(step, 1)
    batch.set("advantages", torch.zeros(len(batch.vectors["rollout_logprobs"])))
    rank0.recorder.record(step, [*rank0.source.samples], batch, version=1)  # type: ignore[attr-defined]


def test_a_checkpoint_counts_once_its_samples_are_on_the_disk(
    open_rank0: Open, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank0 = open_rank0(None)
    rank0.generate(1)
    gate = threading.Event()

    def write(*given: Any, **named: Any) -> list[Any]:
        assert gate.wait(60)
        return write_rollouts(*given, **named)

    monkeypatch.setattr(rollouts, "write_rollouts", write)
    recorded(rank0, 1)
    assert directory.recorded_steps() == [], "training does not wait for the disk"
    rank0.begin_checkpoint(1)
    threading.Timer(0.05, gate.set).start()
    rank0.commit_checkpoint(1)
    assert directory.recorded_steps() == [1] == committed_steps(directory.checkpoints)


def test_as_many_steps_keep_their_samples_as_were_asked_for(
    open_rank0: Open, directory: RunDirectory
) -> None:
    rank0 = open_rank0(None, tracking={"keep_rollouts": 2})
    for step in range(1, 6):
        rank0.generate(step)
        recorded(rank0, step)
    rank0.recorder.finish()
    assert directory.recorded_steps() == [4, 5]


def test_logs_do_not_grow_with_the_run(
    open_rank0: Open, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "LOG_BYTES", 3)
    (directory.logs / "engine_0.log").write_text("many")
    rank0 = open_rank0(None)
    rank0.metrics = {}
    rank0.log(0, {})
    assert (directory.logs / "engine_0.log").read_text() == ""
    assert (directory.logs / "engine_0.log.1").read_text() == "many"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), ValueError("a defect")])
def test_a_recording_that_cannot_be_written_fails_the_run_and_no_checkpoint_counts(
    open_rank0: Open, directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    rank0 = open_rank0(None)
    rank0.generate(1)

    def write(*_: Any, **__: Any) -> list[Any]:
        raise error

    monkeypatch.setattr(rollouts, "write_rollouts", write)
    recorded(rank0, 1)
    rank0.begin_checkpoint(1)
    with pytest.raises(type(error), match=str(error.args[-1])):
        rank0.commit_checkpoint(1)
    assert committed_steps(directory.checkpoints) == []
    with pytest.raises(type(error)):
        rank0.conclude("completed")
    assert directory.read_result() is None
    rank0.conclude("failed", reason=str(error))
    result = directory.read_result()
    assert result is not None
    assert result["status"] == "failed"


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
    assert not any("no checkpoint" in line for line in cast(Notes, rank0.tracker).lines)
    conclude(directory, "failed", "killed before its first step")
    assert (directory.read_result() or {})["steps"] == 4


def test_checkpoints_of_later_steps_are_set_aside(open_rank0: Open) -> None:
    """A damaged one, say, or those behind a chosen step: they would count as kept ones."""
    found = saved(open_rank0(None), 4, version=6)
    store = found.folder.parent
    shutil.copytree(found.folder, store / "step_000006")
    rank0 = open_rank0(found)
    rank0.restore()
    assert committed_steps(store) == [4, 6], "it may still be refused"
    rank0.begin()
    assert committed_steps(store) == [4]
    assert (store / "discarded_step_000006" / "manifest.json").exists()


def test_a_run_that_begins_again_has_none(open_rank0: Open, directory: RunDirectory) -> None:
    """Nor an evaluation before training: that comes again."""
    metrics = MetricsFile(directory.metrics_path)
    for step in range(2):
        metrics.append(step, {})
    rank0 = open_rank0(None)
    rank0.restore()
    assert rank0.begin() == f"0 {CONTINUE}"
    assert read_metrics(directory.metrics_path) == []
    assert cast(Notes, rank0.tracker).lines == [
        "WARNING no checkpoint to resume from (checkpoint.every): the run starts over, and 2 rows"
        " of its log are deleted"
    ]
    assert cast(Notes, resumed(open_rank0(None)).tracker).lines == []


def test_the_segments_of_a_rollout_are_one_episode(
    open_rank0: Open, make_sample: Callable[..., Sample]
) -> None:
    rank0 = open_rank0(None)
    samples = [make_sample(index=index) for index in range(3)]
    for sample, rollout in zip(samples, (5, 5, 6)):
        sample.rollout_id = rollout
    cast(Source, rank0.source).samples = samples
    rank0.generate(1)
    batch = rank0.build_batch(1, 6)
    rank0.end_step(1, batch, [], {"step": 2.0, "generation": 1.0})
    assert (batch.num_sequences, rank0.episodes, rank0.metrics["episode"]) == (3, 2, 2)


def test_optimizer_steps_are_even_in_rollouts(
    open_rank0: Open, make_sample: Callable[..., Sample]
) -> None:
    rank0 = open_rank0(None, algorithm={"minibatches": 2})
    samples = [make_sample(draw, index=index) for draw in range(4) for index in range(3)]
    cast(Source, rank0.source).samples = [s for s in samples if s.draw == 0 or s.index == 0]
    rank0.generate(1)
    groups = rank0.build_batch(1, 6).vectors["group_ids"]
    assert [len(set(groups[rows].tolist())) for rows in rank0.minibatches] == [2, 2]


def test_samples_and_their_batch_hold_each_token_once(open_rank0: Open) -> None:
    rank0 = open_rank0(None)
    rank0.generate(1)
    batch = rank0.build_batch(1, 6)
    (sample,) = cast(Source, rank0.source).samples
    assert np.shares_memory(sample.tokens, batch.tokens.numpy())


# --- the best checkpoint --------------------------------------------------------------------------


def scored(
    rank0: RankZero, step: int, value: float | None, *, sets: Sequence[str] = ("hard",)
) -> bool:
    """Evaluate after `step`, and save a checkpoint in any case."""
    source = cast(Source, rank0.source)
    source.scores = {"eval/score": 1.0, "eval/hard/score": 0.5}
    if value is not None:
        source.scores["eval/hard/pass@1"] = value
    rank0.metrics = {}
    rank0.evaluate(sets)
    rank0.log(0, {})  # of step 0: it writes no rollouts
    found = rank0.find_best(step)
    if step > 0:
        saved(rank0, step, version=step)
    return found


def test_the_best_checkpoint_is_kept_beyond_the_newest(open_rank0: Open) -> None:
    rank0 = open_rank0(None, evaluation=HELD_OUT, checkpoint=PASS)
    folder = rank0.checkpoints.folder
    values = {0: 0.9, 1: 0.2, 2: 0.6, 3: 0.6, 4: float("nan"), 5: 0.1}
    found = [scored(rank0, step, value) for step, value in values.items()]
    assert found == [False, True, True, False, False, False], "not of step 0: it has no checkpoint"
    assert committed_steps(folder) == [2, 5]
    assert read_best(folder) == Best(2, "eval/hard/pass@1", "max", 0.6)
    assert scored(rank0, 6, 0.8)
    assert committed_steps(folder) == [6]
    assert not scored(rank0, 7, 0.99, sets=("",)), "another set was scored"
    assert committed_steps(folder) == [6, 7]


def test_the_smallest_value_may_be_the_best(open_rank0: Open) -> None:
    least = {"best": {"metric": "eval/hard/pass@1", "mode": "min"}}
    rank0 = open_rank0(None, evaluation=HELD_OUT, checkpoint=least)
    assert [scored(rank0, step, value) for step, value in ((1, 3.0), (2, 2.0), (3, 2.5))] == [
        True,
        True,
        False,
    ]


def test_a_resumed_run_goes_on_from_the_best_of_its_checkpoint(open_rank0: Open) -> None:
    given = {"evaluation": HELD_OUT, "checkpoint": PASS}
    rank0 = open_rank0(None, **given)
    for step, value in ((1, 0.5), (2, 0.7), (3, 0.1)):
        scored(rank0, step, value)
    folder = rank0.checkpoints.folder
    found = latest_checkpoint(folder)
    assert found is not None
    (folder / "best.json").unlink()  # a kill came between the two renames of a commit
    again = resumed(open_rank0(found, **given))
    assert again.best == read_best(folder) == Best(2, "eval/hard/pass@1", "max", 0.7)
    assert not scored(again, 4, 0.6)
    assert committed_steps(folder) == [2, 4]

    assert resumed(open_rank0(latest_checkpoint(folder), evaluation=HELD_OUT)).best is None
    assert not (folder / "best.json").exists()


def test_a_best_checkpoint_that_is_gone_is_said(open_rank0: Open) -> None:
    given = {"evaluation": HELD_OUT, "checkpoint": PASS}
    rank0 = open_rank0(None, **given)
    scored(rank0, 1, 0.5)
    scored(rank0, 2, 0.1)
    remove_tree(rank0.checkpoints.path(1))
    again = resumed(open_rank0(latest_checkpoint(rank0.checkpoints.folder), **given))
    assert "the checkpoint of step 1 with the best eval/hard/pass@1 is gone" in " ".join(
        cast(Notes, again.tracker).lines
    )
    assert scored(again, 3, 0.2)


def test_a_metric_that_the_evaluation_does_not_give_is_refused_before_the_first_step(
    open_rank0: Open,
) -> None:
    rank0 = open_rank0(None, evaluation=HELD_OUT, checkpoint=PASS)
    with pytest.raises(ConfigError, match=r"gave no eval/hard/pass@1; it gave eval/hard/score"):
        scored(rank0, 0, None)
    assert not scored(rank0, 1, None)
    assert cast(Notes, rank0.tracker).lines[-1].startswith("WARNING checkpoint.best.metric")


def test_a_checkpoint_can_be_named_by_its_step_or_as_the_best(
    open_rank0: Open, directory: RunDirectory
) -> None:
    rank0 = open_rank0(None, evaluation=HELD_OUT, checkpoint=PASS)
    run = directory.path
    scored(rank0, 1, None)
    with pytest.raises(
        UserError, match=r"export: .*/a has no best checkpoint: checkpoint.best was"
    ):
        find_checkpoint(Path(f"{run}@best"), "export")
    for step, value in ((2, 0.7), (3, 0.1)):
        scored(rank0, step, value)
    assert find_checkpoint(run) == rank0.checkpoints.path(3) / "model"
    for name in ("best", "2"):
        assert find_checkpoint(Path(f"{run}@{name}")) == rank0.checkpoints.path(2) / "model"
    with pytest.raises(UserError, match=r"has no checkpoint of step 1, but of: 2, 3"):
        find_checkpoint(Path(f"{run}@1"))
    with pytest.raises(UserError, match=r"a@newest does not exist; expected a run"):
        find_checkpoint(Path(f"{run}@newest"))
