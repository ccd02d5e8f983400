"""The covering array covers, its cases are awkward enough, and each equals one process."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import covering
import covering_runs
import oracle
import pytest
from cases import LENGTHS, TRAINABLE
from covering import AXES, NAMED, NOT_BUILT, Case, covering_array, legal_cases, one_per_axis
from covering_runs import plans

TIGHT = 1e-5


def built_values(axis: str) -> list[object]:
    return [
        value for value in AXES[axis] if any(getattr(case, axis) == value for case in legal_cases())
    ]


def test_every_two_values_that_can_meet_do_meet() -> None:
    met = 0
    for one, other in combinations(AXES, 2):
        for a, b in product(AXES[one], AXES[other]):
            possible = any(
                getattr(case, one) == a and getattr(case, other) == b for case in legal_cases()
            )
            shown = any(
                getattr(case, one) == a and getattr(case, other) == b for case in covering_array()
            )
            assert shown == possible, f"{one} {a}, {other} {b}"
            met += shown
    assert met > 100


@pytest.mark.parametrize("named", [pytest.param(named, id=named.layout_name) for named in NAMED])
def test_a_named_layout_meets_every_value_of_the_other_axes(named: Case) -> None:
    rows = [case for case in covering_array() if case.layout == named.layout]
    possible = [case for case in legal_cases() if case.layout == named.layout]
    assert bool(rows) == bool(possible)
    for axis in set(AXES) - set(covering.LAYOUT):
        assert {getattr(case, axis) for case in rows} == {
            getattr(case, axis) for case in possible
        }, axis


def test_the_array_is_small_legal_and_always_the_same() -> None:
    rows = covering_array()
    assert len(rows) == len({case.name for case in rows}) <= 45
    assert all(case.legal and case.ranks <= 4 and not case.features & NOT_BUILT for case in rows)
    covering_array.cache_clear()
    assert covering_array() == rows


def test_a_few_cases_have_every_value_of_every_axis() -> None:
    assert len(one_per_axis()) <= 6
    for axis in AXES:
        assert {getattr(case, axis) for case in one_per_axis()} == set(built_values(axis)), axis


@pytest.mark.parametrize(
    ("case", "legal"),
    [
        (Case(), True),
        (Case(sp=True), False),
        (Case(vpp=2), False),
        (Case(tp=2, etp=2, pp=2, dp=2), False),                         # 8 ranks
        (Case(ep=2, dp=2), False),                                      # dense
        (Case("moe", dp=2, ep=2), True),
        (Case("moe", pp=2, ep=2), False),                               # no ranks for it
        # without sequence parallelism
        (Case("moe", tp=2, etp=2), False),
        (Case("moe", tp=2, sp=True, etp=2), True),
        (Case("moe", tp=2, sp=True, etp=1), False),                     # wrong upstream
        (Case("moe", tp=2, sp=True, etp=1, ep=2), True),
        (Case(pp=2, distributed=True), False),
    ],
)  # fmt: skip
def test_legality(case: Case, legal: bool) -> None:
    assert case.legal == legal


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in covering_array()])
def test_every_case_is_awkward(case: Case) -> None:
    """Every case has unequal lengths and an empty sequence, and unequal micro-batches.

    Under DP it has a rank without trainable tokens.
    """
    found = plans(case)
    placed = sorted(i for step in found for rank in step for micro in rank for i in micro)
    assert placed == list(range(len(LENGTHS)))
    assert LENGTHS[2] == 0
    assert len(set(LENGTHS)) > 6
    sizes = {sum(LENGTHS[i] for i in micro) for step in found for rank in step for micro in rank}
    assert len(sizes) > 1
    for step in found:
        assert len({len(rank) for rank in step}) == 1, "every rank has as many micro-batches"
        if case.vpp > 1:
            assert len(step[0]) % case.pp == 0
        if case.dp == 2:
            assert not any(TRAINABLE[i] for micro in step[1] for i in micro)


def check(rows: list[covering_runs.Row], gradient: float, logprob: float) -> None:
    off = [
        f"{row.case.name}: gradient {row.gradient:.1e} of {row.weight}, log-probs {row.logprob:.1e}"
        for row in rows
        if not (row.gradient <= gradient and row.logprob <= logprob)
    ]
    assert not off, "\n".join(off)


def test_a_case_of_every_axis_equals_one_process(tmp_path: Path) -> None:
    """Over gloo to 1e-5; by NCCL's rules the numbers of gloo, to the bit."""
    oracle.write_models(tmp_path / "models")
    rows = list(covering_runs.run(one_per_axis(), tmp_path))
    assert len(rows) == len(one_per_axis())
    check(rows, TIGHT, TIGHT)
    assert not covering_runs.differences_under_nccl_rules(one_per_axis(), tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_every_case_equals_one_process(tmp_path: Path) -> None:
    oracle.write_models(tmp_path / "models")
    rows = list(covering_runs.run(covering_array(), tmp_path))
    assert len(rows) == len(covering_array())
    check(rows, TIGHT, TIGHT)
    assert not covering_runs.differences_under_nccl_rules(covering_array(), tmp_path)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_in_bf16_dense_cases_stay_near_fp32(tmp_path: Path) -> None:
    """bf16: log-probs within 0.1, every weight's gradient within 15 %.

    Rounding sends tokens to other experts.
    """
    oracle.write_models(tmp_path / "models")
    dense = [case for case in one_per_axis() if case.family == "dense"]
    check(list(covering_runs.run(dense, tmp_path, dtype="bf16")), 0.15, 0.1)
