"""Filters and orders over columns, compared with plain Python."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rlcore.errors import DataError
from rlcore.runs.sample_index import IndexWriter, Scalars, prompt_number
from rlcore.view import query
from rlcore.view.query import Filter, Place, select, spans_of

Row = tuple[Place, Scalars]


def made(
    folder: Path, first: int, steps: int, rng: np.random.Generator
) -> tuple[IndexWriter, list[Row]]:
    writer = IndexWriter(folder)
    rows: list[Row] = []
    for step in range(first, first + steps):
        samples = [_scalars(rng, k) for k in range(int(rng.integers(1, 12)))]
        writer.append(step, 1, samples)
        rows += [(Place(step, k), one) for k, one in enumerate(samples)]
    return writer, rows


def _scalars(rng: np.random.Generator, k: int) -> Scalars:
    numbers = {
        name: float(np.float32(rng.random())) for name in ("advantage", "entropy", "staleness")
    }
    return {
        **numbers, "draw": k // 3, "index": k % 3, "prompt": prompt_number(str(k // 3)),
        "rollout_id": k, "verdict": "",
        "reward": round(float(rng.random()), 1), "length": int(rng.integers(0, 5)), "tokens": 9,
        "trained": 1, "turns": 1, "gap": math.nan, "error": 0,
        "finish": str(rng.choice(["stop", "length"])), "source": "", "parts": {},
    }  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[query.Span], list[Row]]:
    """Two indexes of one run, looked at in small pieces."""
    monkeypatch.setattr(query, "PIECE", 16)
    rng = np.random.default_rng(0)
    old, before = made(tmp_path / "old", 1, 20, rng)
    new, after = made(tmp_path / "new", 21, 20, rng)
    blocks = [(step, new.index) for step in range(40, 20, -1)]
    blocks += [(step, old.index) for step in range(20, 0, -1)]
    return spans_of(blocks), before + after


def test_blocks_of_neighbours_become_one_span(runs: tuple[list[query.Span], list[Row]]) -> None:
    assert [len(span.steps) for span in runs[0]] == [20, 20]


def test_pieces_are_of_whole_steps_and_as_large_as_they_may_be(
    runs: tuple[list[query.Span], list[Row]],
) -> None:
    for span in runs[0]:
        pieces = [*span.pieces()]
        assert [*pieces[0][1:], *(end for _, end in pieces[1:])] == [
            span.end,
            *(first for first, _ in pieces[:-1]),
        ]
        assert pieces[-1][0] == span.firsts[0]
        for first, end in pieces[:-1]:
            before = max(int(one) for one in span.firsts if one < first)
            assert end - before > query.PIECE, "the step before has no room in it"


@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("order", ["", "reward", "length", "gap"])
@pytest.mark.parametrize(
    "filters",
    [[], [Filter("reward", "<", 0.35)],
     [Filter("finish", "=", "length"), Filter("length", ">=", 2)],
     [Filter("draw", "=", 1)], [Filter("reward", ">", 7)], [Filter("finish", "=", "never")]],
    ids=str,
)  # fmt: skip
def test_the_same_as_by_hand(
    runs: tuple[list[query.Span], list[Row]], filters: list[Filter], order: str, descending: bool
) -> None:
    spans, rows = runs

    def passes(row: Row) -> bool:
        return all(
            query.COMPARISONS[one.comparison](row[1][one.column], one.value) for one in filters
        )

    expected = [row for row in rows if passes(row)]
    found = select(spans, filters, order=order, descending=descending, offset=3, limit=20)
    assert found.total == len(expected)
    if order:
        sign = -1 if descending else 1
        keys = sorted(
            sign * row[1][order] if row[1][order] == row[1][order] else math.inf for row in expected
        )
        scalars = dict(rows)
        shown = [sign * scalars[place][order] for place in found.places]
        np.testing.assert_allclose(shown, [math.nan if k == math.inf else k for k in keys[3:23]])
        assert len({*found.places}) == len(found.places)
    else:
        expected.sort(key=lambda row: (-row[0].step, row[0].row))
        assert found.places == [place for place, _ in expected][3:23]


@pytest.mark.parametrize("piece", [1 << 19, 64])
@pytest.mark.parametrize("descending", [True, False])
def test_pages_of_equal_values_show_each_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, descending: bool
) -> None:
    monkeypatch.setattr(query, "PIECE", piece)
    writer, rows = made(tmp_path / "index", 1, 60, np.random.default_rng(0))
    spans = spans_of([(step, writer.index) for step in range(60, 0, -1)])
    pages = [
        select(spans, order="reward", descending=descending, offset=offset, limit=10).places
        for offset in range(0, len(rows), 10)
    ]
    shown = [place for page in pages for place in page]
    assert len(shown) == len(rows)
    assert {*shown} == {place for place, _ in rows}


def test_a_prompt_is_found_by_its_64_bits(runs: tuple[list[query.Span], list[Row]]) -> None:
    spans, rows = runs
    found = select(spans, [Filter("prompt", "=", prompt_number("1"))], limit=1000)
    assert {*found.places} == {place for place, one in rows if one["draw"] == 1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(Filter("reward", "~", 1.0), "is no comparison"), (Filter("reward", "<", "x"), "a number")],
)
def test_wrong_filters_are_named(
    runs: tuple[list[query.Span], list[Row]], wrong: Filter, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        select(runs[0], [wrong])


def test_a_column_that_no_sample_has_matches_none(runs: tuple[list[query.Span], list[Row]]) -> None:
    assert select(runs[0], [Filter("part.none", ">", 0.0)]).total == 0


def test_pages_end_somewhere(runs: tuple[list[query.Span], list[Row]]) -> None:
    with pytest.raises(DataError, match="filter more"):
        select(runs[0], offset=query.DEEPEST, limit=1)
