"""The index of samples: appended step by step, through kills, rewinds and damage."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from rlcore.data.sample import Sample, VersionSpan
from rlcore.errors import DataError
from rlcore.runs.rollouts import read_rollouts, write_rollouts
from rlcore.runs.sample_index import JOURNAL, IndexWriter, SampleIndex, Scalars, scalars_of


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


def rows(folder: Path, column: str) -> dict[int, list[float]]:
    index = SampleIndex(folder)
    index.refresh()
    return {
        step: index.column(column)[block.first : block.first + block.rows].tolist()
        for step, block in index.blocks.items()
    }


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
    assert (found["finish"], found["source"], found["parts"]) == ("stop", "sums", {"right": 0.5})


def test_branches_and_verdicts_have_columns(tmp_path: Path) -> None:
    """Of draw 0 the second rollout became two samples; the verdict is that of evaluations."""
    made = [sample(0, 0, 1.0), sample(0, 1, 0.0), sample(0, 2, 0.0), sample(1, 0, 0.5)]
    for one, rollout in zip(made, [10, 11, 11, 1 << 20]):
        one.rollout_id = rollout
    made[0].metadata["correct"] = True
    made[1].metadata["correct"] = False
    made[2].metadata["reward_error"] = "judge: down"
    writer = IndexWriter(tmp_path)
    writer.append(1, 10, scalars(*made))
    writer.append(2, 10, [])
    assert rows(tmp_path, "rollout") == {1: [0, 1, 1, 0], 2: []}
    assert rows(tmp_path, "branch") == {1: [1, 1, 2, 1], 2: []}
    assert rows(tmp_path, "branches") == {1: [1, 2, 2, 1], 2: []}
    names = writer.index.names["verdict"]
    assert [names[k] for k in rows(tmp_path, "verdict")[1]] == ["right", "wrong", "wrong", ""]


def test_steps_stand_side_by_side_and_flat_groups_are_marked(tmp_path: Path) -> None:
    writer = IndexWriter(tmp_path)
    writer.append(1, 10, scalars(sample(0, 0, 1.0), sample(0, 1, 1.0), sample(1, 0, 0.5)))
    writer.append(2, 20, scalars(sample(2, 0, 0.0), sample(2, 1, 1.0)))
    assert rows(tmp_path, "reward") == {1: [1.0, 1.0, 0.5], 2: [0.0, 1.0]}
    assert rows(tmp_path, "flat") == {1: [1, 1, 0], 2: [0, 0]}
    assert rows(tmp_path, "staleness") == {1: [1.0] * 3, 2: [1.0] * 2}


def test_a_part_that_comes_later_is_missing_before(tmp_path: Path) -> None:
    writer = IndexWriter(tmp_path)
    writer.append(1, 10, scalars(sample(0, 0, 1.0)))
    writer.append(2, 10, scalars(sample(1, 0, 1.0, reward_parts={"../../x": 0.5})))
    IndexWriter(tmp_path).append(3, 10, scalars(sample(2, 0, 1.0)))
    found = rows(tmp_path, "part.../../x")
    assert math.isnan(found[1][0])
    assert found[2] == [0.5]
    assert math.isnan(found[3][0])
    assert all(path.parent == tmp_path for path in tmp_path.rglob("*"))


def test_what_a_kill_left_is_written_over(tmp_path: Path) -> None:
    writer = IndexWriter(tmp_path)
    writer.append(1, 10, scalars(sample(0, 0, 1.0)))
    for path in tmp_path.glob("*.bin"):  # columns of a step whose line was not written
        path.write_bytes(path.read_bytes() + b"\xff" * 13)
    with open(tmp_path / JOURNAL, "ab") as file:
        file.write(b'{"step": 2, "first"')
    assert rows(tmp_path, "reward") == {1: [1.0]}
    IndexWriter(tmp_path).append(2, 10, scalars(sample(1, 0, 0.5)))
    assert rows(tmp_path, "reward") == {1: [1.0], 2: [0.5]}


def test_a_rewind_forgets_later_steps_and_a_reader_goes_on(tmp_path: Path) -> None:
    writer = IndexWriter(tmp_path)
    for step in (1, 2, 3):
        writer.append(step, 10, scalars(sample(step, 0, float(step))))
    reader = SampleIndex(tmp_path)
    reader.refresh()
    mapped = reader.column("reward")
    again = IndexWriter(tmp_path)
    again.rewind(1)
    again.append(2, 11, scalars(sample(9, 0, 20.0)))
    reader.refresh()
    assert list(reader.blocks) == [1, 2]
    assert mapped.tolist() == [1.0, 2.0, 3.0]  # what was mapped stays readable
    assert rows(tmp_path, "reward") == {1: [1.0], 2: [20.0]}


def test_what_a_failing_machine_lost_is_seen(tmp_path: Path) -> None:
    writer = IndexWriter(tmp_path)
    for step in (1, 2, 3):
        writer.append(step, 10, scalars(sample(step, 0, float(step))))
    path = writer.index.path_of("reward")
    path.write_bytes(path.read_bytes()[:8] + bytes(4))  # the newest was promised, and is zero
    again = IndexWriter(tmp_path)
    assert again.index.damaged() == [3]
    again.rewind(3)
    assert list(rows(tmp_path, "reward")) == [1, 2]


@pytest.mark.parametrize(
    "line",
    [b"[]", b"{", b'{"step": 1}', b'{"step": 1, "first": -1, "rows": 1, "bytes": 1, "crc": 1}',
     b'{"column": "x", "type": "O"}', b'{"column": 3, "type": "<f4"}'],
)  # fmt: skip
def test_nonsense_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(line + b"\n")
    with pytest.raises(DataError, match="not a line of an index"):
        SampleIndex(tmp_path).refresh()


def test_no_link_is_followed(tmp_path: Path) -> None:
    writer = IndexWriter(tmp_path / "index")
    writer.append(1, 10, scalars(sample(0, 0, 1.0)))
    path = writer.index.path_of("reward")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="missing or too short"):
        rows(tmp_path / "index", "reward")


def test_an_index_that_was_begun_anew_is_read_anew(tmp_path: Path) -> None:
    IndexWriter(tmp_path).append(1, 10, scalars(sample(0, 0, 1.0), sample(0, 1, 2.0)))
    reader = SampleIndex(tmp_path)
    reader.refresh()
    content = (tmp_path / JOURNAL).read_bytes()
    for path in tmp_path.iterdir():
        path.unlink()
    IndexWriter(tmp_path).append(4, 10, scalars(sample(0, 0, 3.0)))
    assert json.loads(content.splitlines()[-1])["step"] == 1
    reader.refresh()
    assert list(reader.blocks) == [4]
