"""Corrections against slow references written one sequence at a time, and the rules around them."""

from __future__ import annotations

import math
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from rlcore.algorithms import (
    CORRECTIONS,
    Correction,
    CorrectionLevel,
    CorrectionName,
    CorrectionResult,
    EstimatorInputs,
    InputError,
    Moments,
    loss_weights,
    mask_weights,
    rollout_metrics,
    stale_tokens,
    staleness_metrics,
)

from .helpers import LENGTHS, cu

NAMES = get_args(CorrectionName)
LEVELS = get_args(CorrectionLevel)
EVERY = [(name, level) for name in NAMES for level in LEVELS]


def oracle(
    name: str,
    level: str,
    lower: float,
    upper: float,
    veto: float | None,
    old: list[float],
    engine: list[float],
) -> tuple[list[float], list[bool], list[bool], list[bool]]:
    """One sequence in plain Python: weights, keep, clipped, masked."""
    gaps = [a - b for a, b in zip(old, engine)]
    rejected = any(not math.isfinite(e) for e in engine)
    rejected = rejected or (
        veto is not None and any(math.exp(min(gap, 20.0)) < veto for gap in gaps)
    )
    if rejected:
        return [0.0] * len(gaps), [False] * len(gaps), [False] * len(gaps), [True] * len(gaps)
    weights = []
    keep = []
    clipped = []
    masked = []
    for gap in gaps:
        exponent = {
            "token": gap,
            "sequence": math.fsum(gaps),
            "geometric": math.fsum(gaps) / len(gaps),
        }[level]
        w = math.exp(min(max(exponent, -20.0), 20.0))
        inside = lower <= w <= upper
        weights.append(min(max(w, lower), upper) if name == "tis" else w if inside else 0.0)
        keep.append(inside if name == "mis" else True)
        clipped.append(name == "tis" and not inside)
        masked.append(name != "tis" and not inside)
    return weights, keep, clipped, masked


def check(
    correction: Correction, old: Tensor, engine: Tensor, borders: Tensor, tolerance: float = 1e-12
) -> CorrectionResult:
    """Compare with the oracle, sequence by sequence."""
    result = correction(old, engine, borders)
    lower, upper = correction.bounds
    for first, last in zip(borders.tolist(), borders.tolist()[1:]):
        weights, keep, clipped, masked = oracle(
            correction.name, correction.level, lower, upper, correction.veto,
            old[first:last].tolist(), engine[first:last].tolist(),
        )  # fmt: skip
        assert result.weights[first:last].tolist() == pytest.approx(
            weights, rel=tolerance, abs=tolerance
        )
        assert result.keep[first:last].tolist() == keep
        assert result.metrics["correction_masked"][first:last].tolist() == masked
        if correction.name == "tis":
            assert result.metrics["correction_clipped"][first:last].tolist() == clipped
    return result


def logprobs(size: int, seed: int = 0, spread: float = 0.5) -> tuple[Tensor, Tensor]:
    """Of the trainer and of the engine, float64 [M]."""
    generator = torch.Generator().manual_seed(seed)
    engine = -torch.rand(size, generator=generator, dtype=torch.float64) * 3
    return engine + spread * torch.randn(size, generator=generator, dtype=torch.float64), engine


def options(name: str, **more: float) -> dict[str, Any]:
    """Bounds that leave tokens and sequences on all sides."""
    return (
        {"lower": 0.7, "upper": 1.5, **more}
        if name != "tis"
        else {"lower": 0.5, "upper": 1.5, **more}
    )


# --- against the references -----------------------------------------------------------------------


@pytest.mark.parametrize(("name", "level"), EVERY)
@pytest.mark.parametrize("veto", [None, 0.6])
def test_every_correction_against_its_reference(name: Any, level: Any, veto: float | None) -> None:
    old, engine = logprobs(sum(LENGTHS))
    result = check(
        Correction(name, level=level, veto=veto, **options(name)), old, engine, cu(LENGTHS)
    )
    assert result.weights.dtype == torch.float64
    assert not result.weights.requires_grad
    # sums of so few stay near the bounds, so both sides of each are met
    short = (4, 0, 1, 2, 3, 1, 2, 6)
    old, engine = logprobs(sum(short), seed=3, spread=0.3)
    result = check(
        Correction(name, level=level, veto=veto, **options(name)), old, engine, cu(short)
    )
    used = ~result.metrics["correction_masked"]
    assert bool(used.any())
    if name != "tis" or veto:
        assert bool((~used).any())


def test_the_formulas_by_hand() -> None:
    engine = torch.log(torch.tensor([0.5, 0.5, 0.1, 0.4], dtype=torch.float64))
    # ratios 1, 1/2, 6, 1/2
    old = torch.log(torch.tensor([0.5, 0.25, 0.6, 0.2], dtype=torch.float64))
    borders = torch.tensor([0, 2, 4])

    def run(name: CorrectionName, **keywords: Any) -> tuple[list[float], list[bool]]:
        result = Correction(name, **keywords)(old, engine, borders)
        return [round(w, 9) for w in result.weights.tolist()], result.keep.tolist()

    everything = [True] * 4
    assert run("tis") == ([1.0, 0.5, 2.0, 0.5], everything)
    assert run("tis", lower=0.75) == ([1.0, 0.75, 2.0, 0.75], everything)
    assert run("tis", level="sequence", upper=2.5) == ([0.5, 0.5, 2.5, 2.5], everything)
    assert run("tis", level="geometric") == (
        [round(0.5**0.5, 9)] * 2 + [round(3**0.5, 9)] * 2,
        everything,
    )
    assert run("mis", lower=0.6, upper=4.0) == ([1.0, 0.0, 0.0, 0.0], [True, False, False, False])
    assert run("mis", level="sequence", lower=0.6, upper=4.0) == (
        [0.0, 0.0, 3.0, 3.0],
        [False, False, True, True],
    )
    assert run("icepop", lower=0.6) == ([1.0, 0.0, 0.0, 0.0], everything)
    assert run("icepop", level="geometric", lower=0.8) == (
        [0.0, 0.0] + [round(3**0.5, 9)] * 2,
        everything,
    )
    assert run("tis", veto=0.6) == ([0.0] * 4, [False] * 4)
    assert run("tis", veto=0.4) == run("tis")


# --- properties -----------------------------------------------------------------------------------


@st.composite
def ragged(draw: st.DrawFn) -> tuple[Tensor, Tensor, list[int]]:
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    number = st.floats(-8.0, 0.0)
    vector = st.lists(number, min_size=sum(lengths), max_size=sum(lengths))
    return (
        torch.tensor(draw(vector), dtype=torch.float64),
        torch.tensor(draw(vector), dtype=torch.float64),
        lengths,
    )


@pytest.mark.parametrize(("name", "level"), EVERY)
@given(batch=ragged())
@settings(max_examples=25, deadline=None)
def test_agreement_changes_nothing(
    name: Any, level: Any, batch: tuple[Tensor, Tensor, list[int]]
) -> None:
    old, _, lengths = batch
    result = Correction(name, level=level, veto=0.5)(old, old.clone(), cu(lengths))
    assert torch.equal(result.weights, torch.ones_like(old))
    assert bool(result.keep.all())
    assert not any(
        bool(value.any())
        for metric, value in result.metrics.items()
        if metric != "correction_weight"
    )


@pytest.mark.parametrize(("name", "level"), EVERY)
@given(batch=ragged(), data=st.data())
@settings(max_examples=25, deadline=None)
def test_order_and_split_change_nothing(
    name: Any, level: Any, batch: tuple[Tensor, Tensor, list[int]], data: st.DataObject
) -> None:
    old, engine, lengths = batch
    correction = Correction(name, level=level, veto=1e-3, **options(name))
    whole = correction(old, engine, cu(lengths))
    order = data.draw(st.permutations(range(len(lengths))))
    parts = list(zip(old.split(lengths), engine.split(lengths)))
    alone = [correction(*parts[b], torch.tensor([0, lengths[b]])) for b in order]
    for place, b in enumerate(order):
        assert torch.equal(alone[place].weights, whole.weights.split(lengths)[b])
        assert torch.equal(alone[place].keep, whole.keep.split(lengths)[b])

    moments = Moments()
    expected = Moments()
    for part in alone:
        moments.update(part.metrics)
    expected.update(whole.metrics)
    assert moments.reduce() == pytest.approx(expected.reduce(), rel=1e-12)


# --- extremes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "level"), EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_huge_log_ratios_are_finite(name: Any, level: Any, dtype: torch.dtype) -> None:
    old = torch.tensor([-1e4, 0.0, -1e4, -1e-3, -5.0], dtype=dtype)
    engine = torch.tensor([0.0, -1e4, -1e4, -1e-3, -5.0], dtype=dtype)
    borders = torch.tensor([0, 1, 2, 2, 5])
    check(Correction(name, level=level), old, engine, borders)
    result = check(
        Correction(name, level=level, upper=1e8, lower=1e-8), old, engine, borders, tolerance=1e-6
    )
    assert bool(result.weights.isfinite().all())
    assert result.weights.dtype == dtype
    if name != "tis":
        assert result.weights.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    else:
        assert result.weights.tolist() == pytest.approx([1e-8, 1e8, 1.0, 1.0, 1.0])


def test_a_long_sequence_is_summed_in_double_precision() -> None:
    gap = torch.full((1_000_000,), 1e-6)
    engine = torch.full_like(gap, -2.0).double()
    weights = Correction("tis", level="sequence", upper=10.0)(
        engine + gap.double(), engine, torch.tensor([0, gap.numel()])
    )
    assert weights.weights[0].item() == pytest.approx(math.e, rel=1e-6)


@pytest.mark.parametrize(("name", "level"), EVERY)
def test_batches_without_tokens(name: Any, level: Any) -> None:
    for borders in ([0], [0, 0], [0, 0, 0]):
        result = Correction(name, level=level, veto=0.1)(
            torch.zeros(0), torch.zeros(0), torch.tensor(borders)
        )
        assert result.weights.shape == result.keep.shape == (0,)
        assert result.metrics["correction_vetoed"].tolist() == [False] * (len(borders) - 1)


# --- replies that cannot be trusted ---------------------------------------------------------------


@pytest.mark.parametrize(("name", "level"), EVERY)
@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_corrupt_log_prob_of_the_engine_rejects_its_whole_sequence(
    name: Any, level: Any, broken: float
) -> None:
    old = torch.full((6,), -1.0)
    engine = torch.tensor([-1.0, -1.0, broken, -1.0, -1.0, -1.0])
    result = check(Correction(name, level=level), old, engine, torch.tensor([0, 2, 4, 4, 6]))
    assert result.weights.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert result.keep.tolist() == [True, True, False, False, True, True]
    assert result.metrics["correction_vetoed"].tolist() == [False, True, False, False]


@pytest.mark.parametrize("name", NAMES)
def test_a_broken_trainer_is_not_hidden(name: CorrectionName) -> None:
    result = Correction(name)(
        torch.tensor([math.nan, -1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([0, 2])
    )
    assert math.isnan(result.weights[0].item())
    assert result.keep.tolist() == [True, True]


@pytest.mark.parametrize("level", LEVELS)
def test_the_veto_looks_at_tokens_at_every_level(level: CorrectionLevel) -> None:
    engine = torch.full((4,), -1.0)
    # the ratios of the first sequence multiply to 1
    old = engine + torch.tensor([6.0, -6.0, 0.0, 0.0])
    assert (
        Correction("tis", level=level)(old, engine, torch.tensor([0, 2, 4])).keep.tolist()
        == [True] * 4
    )
    vetoed = Correction("tis", level=level, veto=0.01)(old, engine, torch.tensor([0, 2, 4]))
    assert vetoed.keep.tolist() == [False, False, True, True]
    assert vetoed.metrics["correction_vetoed"].tolist() == [True, False]


# --- metrics --------------------------------------------------------------------------------------


def test_the_metrics_by_hand() -> None:
    engine = torch.zeros(6, dtype=torch.float64)
    old = torch.tensor([0.5, 1.0, 4.0, 1.0, 1e-6, 1.0], dtype=torch.float64).log()
    moments = Moments()
    moments.update(Correction("tis", veto=1e-4)(old, engine, torch.tensor([0, 3, 4, 4, 6])).metrics)
    weights = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert moments.reduce() == pytest.approx({
        "correction/weight_avg": 4.5 / 6,
        "correction/ess": (weights.sum() ** 2 / (6 * weights.square().sum())).item(),
        "correction/clipped_fraction": 1 / 6,
        "correction/masked_fraction": 2 / 6,
        "correction/vetoed_fraction": 1 / 4,
    })  # fmt: skip


def test_the_effective_sample_size_of_nothing_is_zero() -> None:
    moments = Moments()
    moments.update(
        Correction("mis")(torch.tensor([-9.0]), torch.tensor([-1.0]), torch.tensor([0, 1])).metrics
    )
    assert moments.reduce()["correction/ess"] == 0.0
    assert "correction/clipped_fraction" not in moments.reduce()  # only tis clips


# --- construction ---------------------------------------------------------------------------------


def test_the_defaults() -> None:
    assert {name: Correction(name).bounds for name in NAMES} == {
        "tis": (0.0, 2.0), "mis": (0.5, 2.0), "icepop": (0.5, 5.0),
    }  # fmt: skip
    assert Correction("mis", upper=4.0).bounds == (0.25, 4.0)
    assert Correction("tis").veto is None
    assert set(CORRECTIONS) == set(NAMES)
    assert all(spec.formula and spec.source for spec in CORRECTIONS.values())


@pytest.mark.parametrize(("keywords", "message"), [
    ({"name": "tiss"}, r"correction.name: unknown 'tiss'.*'tis'"),
    ({"level": "sentence"}, r"correction.level: unknown 'sentence'.*'sequence'"),
    ({"upper": 0.9}, r"correction.upper: expected a finite number >= 1, got 0.9"),
    ({"upper": math.inf}, r"correction.upper: expected a finite number >= 1, got inf"),
    ({"upper": math.nan}, r"correction.upper: .* got nan"),
    ({"lower": -0.1}, r"correction.lower: expected a number in \[0, 1\], got -0.1"),
    ({"lower": 1.1}, r"correction.lower: expected a number in \[0, 1\], got 1.1"),
    ({"veto": 0.0}, r"correction.veto: expected a number in \(0, 1\) or none, got 0.0"),
    ({"veto": 1.0}, r"correction.veto: expected a number in \(0, 1\) or none, got 1.0"),
])  # fmt: skip
def test_wrong_keywords_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Correction(**{"name": "mis", **keywords})


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(
        InputError, match=r"rollout_logprobs: expected floating numbers \[M\] = \[2\], got .* \[3\]"
    ):
        Correction("tis")(torch.zeros(2), torch.zeros(3), torch.tensor([0, 2]))
    with pytest.raises(InputError, match=r"old_logprobs: .* got torch.int64"):
        Correction("tis")(torch.zeros(2).long(), torch.zeros(2), torch.tensor([0, 2]))
    with pytest.raises(InputError, match="expected never to fall"):
        Correction("tis")(torch.zeros(2), torch.zeros(2), torch.tensor([0, 3, 2]))


def test_inputs_are_not_written() -> None:
    old, engine = logprobs(7)
    before = old.clone(), engine.clone()
    Correction("mis", level="sequence", veto=0.1)(old, engine, torch.tensor([0, 3, 7]))
    assert torch.equal(old, before[0])
    assert torch.equal(engine, before[1])


# --- tokens that are too old ----------------------------------------------------------------------


def test_stale_tokens_by_hand() -> None:
    versions = torch.tensor([7, 6, 5, 4, 7])
    assert stale_tokens(versions, 7, 0).tolist() == [False, True, True, True, False]
    assert stale_tokens(versions, 7, 2).tolist() == [False, False, False, True, False]
    assert stale_tokens(versions, 9, 1).tolist() == [True] * 5
    assert stale_tokens(versions[:0], 7, 0).tolist() == []


def test_stale_tokens_lose_their_weight_and_the_others_keep_theirs() -> None:
    borders = torch.tensor([0, 2, 5])
    weights = loss_weights("seq-mean-token-mean", borders)
    masked = mask_weights(weights, stale_tokens(torch.tensor([3, 2, 3, 3, 1]), 3, 0))
    assert masked.tolist() == pytest.approx([1 / 4, 0.0, 1 / 6, 1 / 6, 0.0])
    assert weights.tolist() == pytest.approx([1 / 4] * 2 + [1 / 6] * 3)  # out of place


def test_wrong_versions_are_refused() -> None:
    versions = torch.tensor([1, 5])
    with pytest.raises(InputError, match="none above the current version 4, got 5"):
        stale_tokens(versions, 4, 0)
    with pytest.raises(
        ValueError, match="max_staleness: expected a number of versions >= 0, got -1"
    ):
        stale_tokens(versions, 5, -1)
    with pytest.raises(InputError, match=r"expected an integer dtype, got torch\.float32"):
        stale_tokens(versions.float(), 5, 0)
    with pytest.raises(
        InputError, match=r"dropped: expected bool of shape \[2\], got torch.bool \[3\]"
    ):
        mask_weights(torch.ones(2), torch.zeros(3, dtype=torch.bool))


def test_the_metrics_of_staleness() -> None:
    inputs = EstimatorInputs(
        cu_seqlens=torch.tensor([0, 1, 4]), rewards=torch.zeros(2), group_ids=torch.zeros(2).long(),
        versions=torch.tensor([7, 6, 5, 4]),
    )  # fmt: skip
    metrics = rollout_metrics(inputs, version=7, max_staleness=1)
    assert metrics["rollout/staleness_mean"] == 1.5
    assert metrics["rollout/staleness_max"] == 3.0
    assert metrics["correction/stale_fraction"] == 0.5
    assert "correction/stale_fraction" not in rollout_metrics(inputs, version=7)


def test_the_staleness_of_spans_is_that_of_their_tokens() -> None:
    versions = torch.tensor([7, 4, 6])
    lengths = torch.tensor([1, 5, 2])
    found = staleness_metrics(versions, 7, 1, lengths=lengths)
    assert found == staleness_metrics(versions.repeat_interleave(lengths), 7, 1)
    assert found["correction/stale_fraction"] == 5 / 8
    assert staleness_metrics(versions[:0], 7, 1, lengths=lengths[:0]) == {}
