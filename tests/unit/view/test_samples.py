"""Filters and orders over the scalars of samples, compared with plain Python."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlcore.errors import DataError
from rlcore.runs.sample_index import Scalars, merge_tables, write_index
from rlcore.view import samples as module
from rlcore.view.samples import PART, Filter, Samples

COMPARISONS = {"<": operator.lt, ">=": operator.ge, ">": operator.gt, "=": operator.eq}
STEPS = 12
Known = tuple[Samples, list[dict[str, Any]]]


def _scalars(rng: np.random.Generator, k: int) -> Scalars:
    numbers = {name: float(rng.random()) for name in ("advantage", "entropy", "staleness")}
    return {
        **numbers, "draw": k // 3, "index": k % 3, "prompt_id": f"file:{k // 3}",
        "rollout_id": k, "verdict": "right" if k % 2 else "",
        "reward": round(float(rng.random()), 1), "length": int(rng.integers(0, 5)), "tokens": 9,
        "trained": 1, "turns": 1, "gap": None, "error": 0,
        "finish": str(rng.choice(["stop", "length"])), "source": "",
        "parts": [("form's", float(rng.random()))] if k % 2 else [],
    }  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Known]:
    """A run in a folder whose name looks like a pattern, and its rows, newest step first.

    Its first ten steps are merged by fives.
    """
    folder = tmp_path_factory.mktemp("run") / "a=[1]*"
    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []
    for step in range(1, STEPS + 1):
        samples = [_scalars(rng, k) for k in range(int(rng.integers(1, 12)))]
        write_index(folder / f"step_{step:06d}.parquet", step, samples)
        known = [{"step": step, "row": row, **one} for row, one in enumerate(samples)]
        rows = known + rows
    files = {step: folder / f"step_{step:06d}.parquet" for step in range(1, STEPS + 1)}
    merged = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MERGED", 5)
        for end in (5, 10):
            merged[end] = folder / "merged" / f"step_{end:06d}.parquet"
            merge_tables(merged[end], [files[step] for step in range(end - 4, end + 1)])
        yield Samples(lambda: files, lambda: merged), rows


@pytest.mark.parametrize("order", ["", "reward", "-reward", "-length", "gap", PART + "form's"])
@pytest.mark.parametrize(
    "filters",
    [[], [Filter("reward", "<", 0.35)],
     [Filter("finish", "=", "length"), Filter("length", ">=", 2)],
     [Filter("draw", "=", 1)], [Filter("reward", ">", 7)], [Filter("finish", "=", "never")],
     [Filter("part.none", ">", 0.0)], [Filter("prompt_id", "=", "file:1")],
     [Filter("length", ">=", 10**30)]],
    ids=str,
)  # fmt: skip
def test_the_same_as_by_hand(run: Known, filters: list[Filter], order: str) -> None:
    samples, rows = run
    expected = [
        row
        for row in rows
        if all(
            one.column in row and COMPARISONS[one.comparison](row[one.column], one.value)
            for one in filters
        )
    ]
    if order:
        sign = -1 if order.startswith("-") else 1
        name = order.removeprefix("-")

        def key(row: dict[str, Any]) -> tuple[bool, float]:
            value = dict(row["parts"]).get("form's") if name.startswith(PART) else row[name]
            return value is None, sign * (value or 0.0)

        expected.sort(key=key)
    found = samples.select(0, STEPS, filters, order=order, offset=3, limit=20)
    assert found.total == len(expected)
    assert [(row["step"], row["row"]) for row in found.rows] == [
        (row["step"], row["row"]) for row in expected[3:23]
    ]


def test_a_row_has_its_parts_and_steps_bound_it(run: Known) -> None:
    samples, rows = run
    found = samples.select(3, 4, limit=500)
    assert found.rows
    assert {row["step"] for row in found.rows} == {3, 4}
    known = next(row for row in rows if (row["step"], row["row"]) == (3, 1))
    row = next(row for row in found.rows if (row["step"], row["row"]) == (3, 1))
    assert row[PART + "form's"] == dict(known["parts"])["form's"]
    assert (row["gap"], row["reward"], row["flat"]) == (None, known["reward"], row["flat"])


def test_counts_and_columns_are_those_of_all_steps(run: Known) -> None:
    samples, rows = run
    assert samples.count() == len(rows)
    columns = samples.columns()
    assert columns["finish"] == ["length", "stop"]
    assert columns["verdict"] == ["", "right"]
    assert columns[PART + "form's"] == []
    nothing = Samples(dict)
    assert (nothing.count(), nothing.columns(), nothing.select(0, 9).total) == (0, {}, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(Filter("reward", "~", 1.0), "is not a comparison"), (Filter("reward", "<", "x"), "a number"),
     (Filter('reward" OR true --', "=", 1.0), "not a column"),
     (Filter("parts", "=", 1.0), "not a column")],
)  # fmt: skip
def test_wrong_filters_are_named(run: Known, wrong: Filter, message: str) -> None:
    with pytest.raises(DataError, match=message):
        run[0].select(0, STEPS, [wrong])


def test_merged_tables_are_read_for_whole_ranges_alone(run: Known) -> None:
    samples, _ = run
    names = [path.parent.name for path in samples._tables(1, 11)]
    assert names == ["merged", "merged", "a=[1]*"]
    assert {path.parent.name for path in samples._tables(2, 9)} == {"a=[1]*"}


def test_a_damaged_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.parquet"
    path.write_bytes(b"PAR1nothing")
    with pytest.raises(DataError, match=r"step_000001\.parquet"):
        Samples(lambda: {1: path}).select(1, 1)
