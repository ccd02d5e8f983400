"""The index of samples: a table of scalars for each step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample, VersionSpan
from rlcore.runs import sample_index
from rlcore.runs.directory import RunDirectory
from rlcore.runs.recorder import RolloutRecorder
from rlcore.runs.rollouts import read_rollouts, write_rollouts
from rlcore.runs.sample_index import Scalars, scalars_of, write_index


def sample(draw: int, index: int, reward: float, **more: object) -> Sample:
    return Sample(
        draw=draw,
        index=index,
        prompt_id=f"file:{draw}",
        group_id=draw,
        rollout_id=draw * 8 + index,
        tokens=np.arange(4, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1], dtype=np.uint8),
        rollout_logprobs=np.array([-0.5, -1.5], dtype=np.float32),
        versions=(VersionSpan(3, 0, 2),),
        finish_reason="stop",
        reward=reward,
        **more,  # type: ignore[arg-type]
    )


def scalars(*samples: Sample) -> list[Scalars]:
    return [scalars_of(one.to_record() | {"step": 5, "policy_version": 4}) for one in samples]


def columns(path: Path, step: int, *samples: Sample) -> dict[str, list[object]]:
    write_index(path / "index" / "a.parquet", step, scalars(*samples))
    found: dict[str, list[object]] = pq.read_table(path / "index" / "a.parquet").to_pydict()
    return found


def test_scalars_are_those_of_the_record(tmp_path: Path) -> None:
    given = sample(7, 1, 0.25, reward_parts={"right": 0.5}, metadata={"source": "sums"})
    vectors = {
        "logprobs": [np.array([-0.25, -1.0], np.float32)],
        "entropy": [np.array([1.0, 2.0], np.float32)],
        "weights": [np.array([0.5, 0.0], np.float32)],
    }
    path = tmp_path / "step_000005.parquet"
    found = write_rollouts(
        path, 5, [given], [np.array([2.0, 4.0], np.float32)], version=4,
        policy_steps={3: 2}, vectors=vectors,
    )[0]  # fmt: skip
    assert found == scalars_of(read_rollouts(path)[0])
    assert {key: found[key] for key in ("draw", "index", "reward", "length", "tokens")} == {
        "draw": 7, "index": 1, "reward": 0.25, "length": 2, "tokens": 4,
    }  # fmt: skip
    assert (found["advantage"], found["entropy"], found["gap"]) == (3.0, 1.5, 0.375)
    assert (found["trained"], found["staleness"], found["turns"]) == (1, 2.0, 1)
    assert (found["finish"], found["source"], found["parts"]) == ("stop", "sums", [("right", 0.5)])


def test_branches_and_verdicts_have_columns(tmp_path: Path) -> None:
    """Of draw 0 the second rollout became two samples; the verdict is that of evaluations."""
    made = [sample(0, 0, 1.0), sample(0, 1, 0.0), sample(0, 2, 0.0), sample(1, 0, 0.5)]
    for one, rollout in zip(made, [10, 11, 11, 1 << 20]):
        one.rollout_id = rollout
    made[0].metadata["correct"] = True
    made[1].metadata["correct"] = False
    made[2].metadata["reward_error"] = "judge: down"
    found = columns(tmp_path, 1, *made)
    assert found["rollout"] == [0, 1, 1, 0]
    assert found["branch"] == [1, 1, 2, 1]
    assert found["branches"] == [1, 2, 2, 1]
    assert found["verdict"] == ["right", "wrong", "wrong", ""]
    assert columns(tmp_path, 2)["rollout"] == []


def test_flat_groups_are_marked_and_what_is_not_known_is_missing(tmp_path: Path) -> None:
    made = [sample(0, 0, 1.0), sample(0, 1, 1.0), sample(1, 0, 0.5, reward_parts={"x": 0.5})]
    made.append(sample(1, 1, float("nan"), metadata={"source": "a\ud83d"}))
    found = columns(tmp_path, 7, *made)
    assert (found["step"], found["row"]) == ([7] * 4, [0, 1, 2, 3])
    assert found["flat"] == [1, 1, 0, 0]
    assert found["staleness"] == [1.0] * 4
    assert found["reward"] == [1.0, 1.0, 0.5, None]
    assert found["entropy"] == [None] * 4
    assert found["parts"] == [[], [], [("x", 0.5)], []]
    assert found["source"][3] == "a\\ud83d"


def test_steps_are_merged_and_what_is_rewound_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_index, "MERGED", 2)
    directory = RunDirectory.create(tmp_path, "run")
    recorder = RolloutRecorder(directory, keep=None, collective_timeout_s=60.0)
    samples = [sample(0, 0, 1.0), sample(0, 1, 0.0)]
    batch = RolloutBatch.from_samples(samples)
    batch.set("advantages", torch.zeros(4))

    def record(*steps: int) -> list[int]:
        for step in steps:
            recorder.record(step, samples, batch, version=None)
        recorder.finish()
        return sorted(int(path.stem[-6:]) for path in directory.merged_index.iterdir())

    assert record(1, 2, 3, 4, 5) == [2, 4]
    table = pq.read_table(directory.merged_index / "step_000004.parquet")
    assert (table["step"].to_pylist(), table["row"].to_pylist()) == ([3, 3, 4, 4], [0, 1, 0, 1])
    directory.rewind(3)
    assert record() == [2]
    assert record(4) == [2, 4]
    directory.index_path(5).unlink(missing_ok=True)
    assert record(6) == [2, 4], "a step before it is not there"
    directory.close()
