"""Recorded samples as a table: what other programs see, and that nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlcore.data.sample import Sample, SamplingMasks, TurnSpan, VersionSpan
from rlcore.errors import DataError
from rlcore.runs import rollouts
from rlcore.runs.rollouts import TYPES, read_rollouts, read_table, table_of, write_rollouts

MakeSample = Callable[..., Sample]


def drawn(rng: np.random.Generator, k: int) -> Sample:
    """A sample with something in every field, or with nothing in any."""
    full = k % 3 != 1
    size = int(rng.integers(2, 40)) if full else 2
    mask = np.concatenate([[0], rng.integers(0, 2, size - 1)]).astype(np.uint8)
    m = int(mask.sum())
    cut = m // 2
    counts = rng.integers(0, 2, m).astype(np.int32)
    tokens = rng.integers(0, 1 << 20, size).astype(np.int32)
    kept = SamplingMasks(tokens[mask == 1][counts == 1], counts)
    return Sample(
        draw=k // 2 + (1 << 40),
        index=k % 2,
        prompt_id=f"datei-ä:{k}",
        group_id=k // 2,
        rollout_id=k,
        tokens=tokens,
        loss_mask=mask,
        rollout_logprobs=-rng.random(m, dtype=np.float32),
        versions=(VersionSpan(3, 0, cut), VersionSpan(1 << 35, cut, m)) if m else (),
        finish_reason="length" if full else "stop",
        reward=float(rng.normal()),
        reward_parts={"a.b": 0.1, "": -1e300} if full else {},
        turns=2 if full else 1,
        prompt_text="x\0é\u202e\n" if full else "",
        label=[None, 10**30, {"a": "\ud800"}] if full else None,
        metadata={"n": 1, "deep": {"list": [1.5, "x"]}} if full else {},
        baseline_reward=0.5 if full else None,
        token_rewards=rng.normal(size=m).astype(np.float32) if full else None,
        sampling_mask=kept if full else None,
        routed_experts=rng.integers(-1, 9, (size, 2, 2)).astype(np.int16) if full else None,
        messages=[{"role": "user", "content": "é"}, {"role": "tool"}] if full else None,
        turn_spans=(TurnSpan(0, 1, 0, cut), TurnSpan(1, 3, cut, m)) if full else (),
        outcome={"won": 1.0} if full else {},
        measured={"calls": 2.0} if full else {},
    )


@pytest.mark.parametrize("limits", [(256, 1 << 18), (3, 1 << 18), (256, 50)])
def test_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int]
) -> None:
    monkeypatch.setattr(rollouts, "MAX_ROWS", limits[0])
    monkeypatch.setattr(rollouts, "MAX_TOKENS", limits[1])
    rng = np.random.default_rng(0)
    samples = [drawn(rng, k) for k in range(20)]
    advantages = [rng.normal(size=s.num_trainable).astype(np.float32) for s in samples]
    entropy = [a * 2 for a in advantages]
    path = tmp_path / "step_000007.parquet"
    steps = {3: 1, 1 << 35: 6}
    write_rollouts(
        path, 7, samples, advantages, version=8, policy_steps=steps, vectors={"entropy": entropy}
    )
    expected = [sample.to_record() | {"step": 7, "policy_version": 8} for sample in samples]
    expected = json.loads(json.dumps(expected))
    for found in (read_rollouts(path), read_rollouts(path, arrays=True)):
        for k, (record, sample) in enumerate(zip(found, samples, strict=True)):
            assert Sample.from_record(record).to_record() == sample.to_record()
            np.testing.assert_array_equal(record.pop("advantages"), advantages[k])
            np.testing.assert_array_equal(record.pop("vectors")["entropy"], entropy[k])
            assert list(record.pop("policy_steps")) == [steps[s.version] for s in sample.versions]
            assert record.keys() == expected[k].keys()
            for name in ("step", "policy_version", "label", "metadata", "reward_parts", "versions"):
                assert record[name] == expected[k][name]
    for record, before in zip(read_rollouts(path), expected):
        assert {name: type(value) for name, value in record.items() if name in before} == {
            name: type(value) for name, value in before.items()
        }


def test_other_programs_see_plain_columns(tmp_path: Path, make_sample: MakeSample) -> None:
    path = tmp_path / "step_000001.parquet"
    write_rollouts(path, 1, [make_sample(k) for k in range(3)], version=5)
    table = pq.read_table(path)
    assert table.column("reward").to_pylist() == [1.0, 1.0, 1.0]
    assert table.column("tokens").to_pylist()[0] == make_sample().tokens.tolist()
    assert table.column("versions").to_pylist()[0][0] == {"version": 4, "start": 0, "end": 1}
    assert table.column("reward_parts").to_pylist()[0] == [("exact_match", 1.0)]
    assert json.loads(table.column("label").to_pylist()[0]) == make_sample().label
    assert "vectors" not in table.column_names
    other = tmp_path / "step_000002.parquet"
    write_rollouts(other, 2, [])
    assert pq.read_table(other).schema.equals(table.schema), "steps can be read as one table"


def test_half_a_surrogate_pair_in_a_text_is_spelled_out(
    tmp_path: Path, make_sample: MakeSample
) -> None:
    path = tmp_path / "step_000001.parquet"
    write_rollouts(path, 1, [make_sample(response_text="a\ud83d")])
    assert read_rollouts(path)[0]["response_text"] == "a\\ud83d"


def test_rows_and_columns_are_chosen_and_no_others_read(
    tmp_path: Path, make_sample: MakeSample, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "MAX_ROWS", 4)
    path = tmp_path / "step_000001.parquet"
    write_rollouts(path, 1, [make_sample(k) for k in range(10)])
    content = bytearray(path.read_bytes())
    rewards = pq.ParquetFile(path).metadata.row_group(0).column(7)
    start = rewards.dictionary_page_offset or rewards.data_page_offset
    content[start + rewards.total_compressed_size - 2] ^= 1
    path.write_bytes(content)
    found = dict(read_table(path, rows=[9, 5, 77, 5]))
    assert {row: record["draw"] for row, record in found.items()} == {5: 5, 9: 9}
    assert next(iter(read_table(path, rows=[4], columns=["draw", "label"])))[1].keys() == {
        "draw",
        "label",
    }
    with pytest.raises(DataError, match="not a readable recording"):
        dict(read_table(path, rows=[1]))


def test_a_changed_number_is_noticed_by_its_pages_checksum(
    tmp_path: Path, make_sample: MakeSample
) -> None:
    path = tmp_path / "step_000001.parquet"
    logprobs = -np.random.default_rng(0).random(4000, dtype=np.float32)
    mask = np.array([0, *[1] * 4000], dtype=np.uint8)
    many = make_sample(
        tokens=np.arange(4001, dtype=np.int32),
        loss_mask=mask,
        rollout_logprobs=logprobs,
        versions=(VersionSpan(4, 0, 4000),),
    )
    write_rollouts(path, 1, [many])
    group = pq.ParquetFile(path).metadata.row_group(0)
    chunks = {one.path_in_schema: one for one in map(group.column, range(group.num_columns))}
    chunk = chunks["rollout_logprobs.list.element"]
    content = bytearray(path.read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size // 4] ^= 1
    path.write_bytes(content)
    [[*read]] = pq.read_table(path).column("rollout_logprobs").to_pylist()
    assert np.count_nonzero(np.array(read, np.float32) != logprobs) == 1, "no other check sees it"
    with pytest.raises(DataError, match="CRC"):
        read_rollouts(path)


def test_a_record_with_a_column_that_no_table_has_is_refused(make_sample: MakeSample) -> None:
    record = make_sample().to_record(arrays=True) | {"step": 1, "policy_version": 1, "colour": 3}
    with pytest.raises(ValueError, match="unknown columns: colour"):
        table_of([record], pa.schema([*TYPES.items()]))


@pytest.mark.parametrize(
    ("most_rows", "most_tokens", "expected"),
    [(4, 1000, [4, 4, 2]), (100, 30, [3, 3, 3, 1]), (100, 5, [1] * 10)],
)
def test_a_row_group_is_cut_by_rows_and_by_tokens(
    tmp_path: Path,
    make_sample: MakeSample,
    monkeypatch: pytest.MonkeyPatch,
    most_rows: int,
    most_tokens: int,
    expected: list[int],
) -> None:
    monkeypatch.setattr(rollouts, "MAX_ROWS", most_rows)
    monkeypatch.setattr(rollouts, "MAX_TOKENS", most_tokens)
    size = 10
    tokens = np.arange(size, dtype=np.int32)
    fields = {
        "loss_mask": np.array([0] * (size - 2) + [1, 1], dtype=np.uint8),
        "rollout_logprobs": np.zeros(2, dtype=np.float32),
        "versions": (VersionSpan(4, 0, 2),),
    }
    path = tmp_path / "step_000001.parquet"
    write_rollouts(path, 1, [make_sample(k, tokens=tokens, **fields) for k in range(10)])
    found = pq.ParquetFile(path).metadata
    assert [found.row_group(k).num_rows for k in range(found.num_row_groups)] == expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": pa.array([[1 << 40]])}, "not in range"),
        ({"rollout_logprobs": pa.array([[1.0, None]])}, "a list with nulls"),
        ({"versions": pa.array([[[1, 2]]])}, "not a readable recording"),
        ({"metadata": pa.array(["{"])}, "not a readable recording"),
        ({"something": pa.array([1])}, "something"),
    ],
)
def test_columns_that_are_not_ours(
    tmp_path: Path, make_sample: MakeSample, change: Mapping[str, Any], said: str
) -> None:
    path = tmp_path / "step_000001.parquet"
    write_rollouts(path, 1, [make_sample()])
    table = pq.read_table(path)
    columns = {name: table.column(name) for name in table.column_names} | change
    pq.write_table(pa.table(columns), path)
    with pytest.raises(DataError, match=rf"step_000001\.parquet: .*{said}"):
        read_rollouts(path)


def test_a_row_group_that_would_fill_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "step_000001.parquet"
    zeros = pa.array(np.zeros(1 << 16, dtype=np.int64))
    pq.write_table(pa.table({"draw": zeros}), path, use_dictionary=False)
    monkeypatch.setattr(rollouts, "MAX_BYTES", 1 << 18)
    with pytest.raises(DataError, match="a row group of 52"):
        read_rollouts(path)
