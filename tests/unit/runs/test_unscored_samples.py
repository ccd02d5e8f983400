"""Samples whose reward failed are recorded, kept in checkpoints, and never trained on."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample, VersionSpan
from rlcore.runs.rollouts import decode_samples, encode_samples, read_rollouts, write_rollouts
from rlcore.runs.sample_index import flat_groups
from rlcore.tracking.format import pick_samples
from rlcore.trainer.sources import ReplaySource
from rlcore.view.comparison import _flip, _mean_reward
from rollout.collection.buffer import BufferedGroup, decode
from rollout.collection.group_runner import Group


def sample(reward: float, *, draw: int = 0, index: int = 0) -> Sample:
    return Sample(
        draw=draw,
        index=index,
        prompt_id="rows.jsonl:1",
        group_id=draw,
        rollout_id=2 * draw + index,
        tokens=np.array([3, 4, 5], dtype=np.int32),
        loss_mask=np.array([0, 1, 1], dtype=np.uint8),
        rollout_logprobs=np.array([-0.5, -0.25], dtype=np.float32),
        versions=(VersionSpan(0, 0, 2),),
        finish_reason="stop",
        reward=reward,
        metadata={} if not math.isnan(reward) else {"reward_error": "rm: down"},
    )


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    path = tmp_path / "step_000001.parquet"
    ones = [np.ones(2, dtype=np.float32)] * 2
    scalars = write_rollouts(
        path,
        1,
        [sample(1.0), sample(1.0, index=1)],
        ones,
        vectors={"entropy": ones},
        unscored=[sample(math.nan, index=2)],
    )
    assert [one["error"] for one in scalars] == [0, 0, 1]
    assert [one["reward"] for one in scalars] == [1.0, 1.0, None]
    assert [*flat_groups(scalars)] == [1, 1, 1], "the rewards that it has are equal"
    return path


def test_they_stand_behind_the_others_without_vectors(recorded: Path) -> None:
    *trained, last = read_rollouts(recorded)
    assert all({"advantages", "vectors"} <= record.keys() for record in trained)
    assert not {"advantages", "vectors"} & last.keys()
    assert not Sample.from_record(last).is_scored
    assert last["metadata"] == {"reward_error": "rm: down"}


def test_a_replay_leaves_them_out(recorded: Path) -> None:
    assert [one.index for one in ReplaySource(recorded, vocab_size=9).samples] == [0, 1]


def test_no_batch_takes_them() -> None:
    RolloutBatch.from_samples([sample(1.0)])
    for reward in (math.nan, math.inf):
        with pytest.raises(ValueError, match="sample 0 of draw 0 has the reward"):
            RolloutBatch.from_samples([sample(1.0, draw=1), sample(reward)])


def test_a_checkpoint_keeps_them() -> None:
    (again,) = decode_samples(encode_samples([sample(math.nan)]))
    assert not again.is_scored
    group = Group(3, [sample(1.0, draw=3)], unscored=[sample(math.nan, draw=3, index=1)])
    (buffered,) = decode([BufferedGroup(group, 0, 0).encoded])
    assert [one.index for one in buffered.group.samples] == [0]
    assert [one.index for one in buffered.group.unscored] == [1]


def test_pages_and_terminal_show_them_last_and_in_no_mean() -> None:
    records = [sample(reward).to_record() for reward in (1.0, math.nan, 0.0)]
    assert _mean_reward(records) == 0.5
    assert _mean_reward([]) is None
    for record, metadata in zip(records, ({"correct": True}, {"reward_error": "down"}, {})):
        record["metadata"] = metadata
    records[2]["metadata"] = {"correct": False}
    right, failed, wrong = ([record] for record in records)
    assert _flip(failed, right) == _flip(right, failed) == ""
    assert _flip(right, wrong) == "better"
    failed[0]["reward"] = 0.0
    assert _flip(right, failed) == "better", "a failure that has a score counts as wrong"
    shown = pick_samples([sample(math.nan), sample(0.0), sample(1.0)], 3)
    assert [one.reward for one in shown[:2]] == [1.0, 0.0]
