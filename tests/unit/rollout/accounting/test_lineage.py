"""The weights that may have made the tokens of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlcore.errors import DataError
from rlcore.runs.versions import Version, read_versions
from rollout.accounting.audit import Lineage, check_versions

# A trainer that did four steps; started again from step 2, did three; started again from step 4 of
# those.
RUN = [
    Version(*one)
    for one in (
        (1, 0, 0),
        (2, 1, 0),
        (3, 2, 0),
        (4, 3, 0),
        (5, 4, 0),
        # 7 failed half-way and was not even written down
        (6, 2, 1),
        (8, 3, 1),
        (9, 4, 1),
        (10, 5, 1),
        (11, 4, 2),
        (12, 5, 2),
    )
]


def records(trained: int | None, *made: int) -> list[dict[str, Any]]:
    return [{"policy_version": trained, "versions": [[version, 0, 1]]} for version in made]


def said(step: int, trained: int | None, *made: int, max_staleness: int | None = 1) -> list[str]:
    return list(Lineage(RUN).check(step, records(trained, *made), max_staleness))


@pytest.mark.parametrize(
    ("step", "trained", "made"),
    [
        (1, 1, [1]),
        (2, 2, [1, 2]),
        # weights of steps 1 and 2 of the first incarnation are those that the second began with
        (3, 6, [6, 2, 3]),
        (4, 8, [8, 6]),
        (5, 11, [11, 9, 8]),
        (6, 12, [11, 12]),
    ],
)
def test_tokens_of_ancestors_are_right(step: int, trained: int, made: list[int]) -> None:
    assert said(step, trained, *made) == []


@pytest.mark.parametrize(
    ("step", "trained", "made", "message"),
    [
        (3, 6, [1], "version 1, of policy step 0: rollout.max_staleness was 1"),
        (4, 8, [4], "version 4, of step 3 of a trainer that was rolled back behind it"),
        (4, 8, [5], "version 5, of step 4 of a trainer that was rolled back behind it"),
        (5, 11, [10], "version 10, of step 5 of a trainer that was rolled back behind it"),
        (2, 2, [3], "version 3, of policy step 2: rollout.max_staleness was 1"),  # of the future
        (2, 2, [7], "version 7, which was never published"),
        (3, 3, [3], "step 3 was recorded by a trainer that was restarted from an earlier step"),
        (5, 5, [5], "step 5 was recorded by a trainer that was restarted from an earlier step"),
        (6, 10, [10], "step 6 was recorded by a trainer that was restarted from an earlier step"),
        (4, 9, [9], "step 4 has trained version 9, which is of step 4"),
        (4, None, [8], "step 4 has trained version None, which was never published"),
    ],
)
def test_other_tokens_are_named(
    step: int, trained: int | None, made: list[int], message: str
) -> None:
    assert any(message in one for one in said(step, trained, *made)), said(step, trained, *made)


def test_the_bound_is_the_one_that_is_given() -> None:
    assert said(3, 6, 1, max_staleness=2) == []
    assert said(4, 8, 6, max_staleness=0) == [
        "step 4 was trained on tokens of version 6, of policy step 2: rollout.max_staleness was 0"
    ]


def test_without_a_bound_any_age_is_right() -> None:
    assert said(4, 8, 1, max_staleness=None) == []
    assert said(2, 2, 3, max_staleness=None) == [
        "step 2 was trained on tokens of version 3, of policy step 2: rollout.max_staleness was"
        " None"
    ]


def test_every_span_of_a_sample_is_looked_at() -> None:
    record = {"policy_version": 8, "versions": [[6, 0, 3], [5, 3, 5]]}
    (only,) = Lineage(RUN).check(4, [record], 1)
    assert "version 5, of step 4 of a trainer that was rolled back behind it" in only


def test_incarnations_and_their_steps_do_not_go_back() -> None:
    assert list(check_versions(RUN)) == []
    assert list(check_versions([*RUN, Version(13, 5, 2)])) == [], (
        "the same weights, to engines that have lost them"
    )
    wrong = [Version(1, 1, 0), Version(2, 0, 0), Version(3, 1, 1), Version(4, 1, 0)]
    assert list(check_versions(wrong)) == [
        "version 2 has the weights of step 0, the one before those of 1",
        "version 4 is of incarnation 0, the one before of 1",
    ]


def test_versions_only_grow(tmp_path: Path) -> None:
    path = tmp_path / "versions.jsonl"
    line = '{"version": 1, "step": 0, "incarnation": 0}\n'
    path.write_text(2 * line)
    with pytest.raises(DataError, match=r"versions.jsonl:2: .* versions only grow"):
        read_versions(path)
