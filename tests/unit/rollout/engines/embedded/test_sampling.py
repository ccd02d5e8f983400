"""Addressed random numbers, and the draw of a token from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from rlcore.data.generation import SamplingParams
from rollout.engines.embedded.sampling import (
    SamplingTable,
    draw,
    keep_mask,
    philox4x32,
    sample_tokens,
    uniforms,
)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers of Random123's kat_vectors
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    assert tuple(int(word) for word in philox4x32(counter, key)) == expected


def test_uniforms_are_uniform_along_every_part_of_the_address():
    axis = np.arange(20_000)
    for address in [(axis, 0, 0, 0), (0, axis, 0, 0), (0, 0, axis, 0), (0, 0, 0, axis)]:
        u = uniforms(7, *address)
        assert u.min() >= 0
        assert u.max() < 1
        assert stats.kstest(u, "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.03
    by_seed = np.array([uniforms(seed, 0, 0, 0, 0) for seed in range(5000)])
    assert stats.kstest(by_seed, "uniform").pvalue > 1e-3


def test_uniforms_depend_on_the_address_alone():
    grid = uniforms(3, np.arange(5)[:, None], np.arange(4)[None, :], 2, 9)
    for row in range(5):
        for sample in range(4):
            assert grid[row, sample] == uniforms(3, row, sample, 2, 9)
    assert len(np.unique(grid)) == grid.size
    # the high half of the seed counts
    assert uniforms(1 << 33, 0, 0, 0, 0) != uniforms(0, 0, 0, 0, 0)


def reference_keep(probs: np.ndarray, top_p: float, top_k: int) -> set[int]:
    """The slow, obvious way."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = order[:top_k] if top_k > 0 else order
    total = sum(probs[i] for i in order)
    mass = 0.0
    kept = set()
    for token in order:
        if top_p < 1 and mass >= top_p * total and kept:
            break
        kept.add(token)
        mass += probs[token]
    return kept


def test_top_p_and_top_k_against_the_slow_reference():
    generator = torch.Generator().manual_seed(0)
    for vocab in (1, 2, 31, 200):
        probs = (torch.randn(40, vocab, generator=generator) * 2).softmax(-1)
        top_p = torch.rand(40, dtype=torch.float64, generator=generator).clamp(min=0.01)
        top_p[::5] = 1.0
        top_k = torch.randint(1, vocab + 1, (40,), generator=generator)
        mask = keep_mask(probs, top_p, top_k)
        for row in range(40):
            expected = reference_keep(
                probs[row].double().numpy(), float(top_p[row]), int(top_k[row])
            )
            assert set(mask[row].nonzero()[:, 0].tolist()) == expected


def test_ties_are_kept_in_the_order_of_ids():
    probs = torch.full((1, 8), 0.125)
    assert (
        keep_mask(probs, torch.tensor([1.0]).double(), torch.tensor([3]))[0].tolist()
        == [True] * 3 + [False] * 5
    )
    assert (
        keep_mask(probs, torch.tensor([0.5]).double(), torch.tensor([8]))[0].tolist()
        == [True] * 4 + [False] * 4
    )


def test_top_p_of_1_keeps_what_has_no_probability():
    probs = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    everything = keep_mask(probs, torch.tensor([1.0]).double(), torch.tensor([4]))
    assert everything.all()
    most = keep_mask(probs, torch.tensor([0.999]).double(), torch.tensor([4]))
    assert most[0].tolist() == [True, True, False, False]


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    rows = logits.expand(count, -1)
    table = SamplingTable.build([params] * count, logits.shape[-1])
    uniform = torch.from_numpy(uniforms(5, np.arange(count), 0, 0, 0))
    return sample_tokens(rows, table, uniform)[0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.6),
        SamplingParams(1, temperature=1.4, top_p=0.8),
        SamplingParams(1, top_k=5),
        SamplingParams(1, temperature=0.8, top_p=0.9, top_k=12),
    ],
)
def test_draws_follow_the_distribution(params):
    logits = torch.randn(31, generator=torch.Generator().manual_seed(1))
    probs = (logits.double() / params.temperature).softmax(-1).numpy()
    kept = reference_keep(probs, params.top_p, params.top_k)
    expected = np.array([p if i in kept else 0.0 for i, p in enumerate(probs)])
    expected /= expected.sum()
    counts = np.bincount(draw_many(logits, params, 40_000).numpy(), minlength=31)
    assert counts[expected == 0].sum() == 0
    alive = expected > 0
    assert stats.chisquare(counts[alive], expected[alive] * counts.sum()).pvalue > 1e-3


def test_logprobs_are_of_the_tempered_unfiltered_distribution():
    logits = torch.randn(6, 31, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(1, temperature=t, top_p=p)
        for t, p in [(1, 1), (0.5, 1), (2, 0.3), (0, 1), (1, 0.1), (0, 0.5)]
    ]
    tokens, logprobs, kept = sample_tokens(
        logits, SamplingTable.build(params, 31), torch.rand(6, dtype=torch.float64)
    )
    assert kept is None
    for row, p in enumerate(params):
        full = (logits[row] / (p.temperature or 1.0)).log_softmax(-1)
        assert logprobs[row].item() == pytest.approx(full[tokens[row]].item(), abs=1e-6)
        if p.temperature == 0:
            assert tokens[row] == logits[row].argmax()


def test_with_sampling_masks_logprobs_are_of_the_truncated_distribution():
    logits = torch.randn(6, 31, generator=torch.Generator().manual_seed(2))
    settings = [(1, 1, -1), (0.5, 0.6, -1), (2, 1, 5), (0.8, 0.5, 9), (0, 0.5, 3), (1, 1e-6, -1)]
    params = [
        SamplingParams(1, temperature=t, top_p=p, top_k=k, sampling_mask=True)
        for t, p, k in settings
    ]
    plain = [SamplingParams(1, temperature=t, top_p=p, top_k=k) for t, p, k in settings]
    uniform = torch.rand(6, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    tokens, logprobs, kept = sample_tokens(logits, SamplingTable.build(params, 31), uniform)
    assert torch.equal(
        tokens, sample_tokens(logits, SamplingTable.build(plain, 31), uniform).tokens
    )
    for row, p in enumerate(params):
        full = (logits[row].double() / (p.temperature or 1.0)).log_softmax(-1)
        allowed = (
            reference_keep(full.exp().numpy(), p.top_p, p.top_k)
            if p.temperature
            else set(range(31))
        )
        assert set(kept[row].nonzero()[:, 0].tolist()) == allowed
        among = full[sorted(allowed)].log_softmax(-1)
        assert logprobs[row].item() == pytest.approx(
            among[sorted(allowed).index(int(tokens[row]))].item(), abs=1e-6
        )


def test_a_row_is_drawn_alike_in_any_company():
    logits = torch.randn(5, 31, generator=torch.Generator().manual_seed(3))
    params = [
        SamplingParams(1),
        SamplingParams(1, top_p=0.5),
        SamplingParams(1, temperature=0),
        SamplingParams(1, 0.7),
        SamplingParams(1, top_k=2, sampling_mask=True),
    ]
    uniform = torch.from_numpy(uniforms(1, np.arange(5), 0, 0, 0))
    table = SamplingTable.build(params, 31)
    together = sample_tokens(logits, table, uniform)[0]
    for row in range(5):
        own = SamplingTable.build(params[row : row + 1], 31)
        assert sample_tokens(logits[row : row + 1], own, uniform[row : row + 1])[0] == together[row]
        picked = torch.tensor([row])
        assert (
            sample_tokens(logits[picked], table.select(picked), uniform[picked])[0] == together[row]
        )


@pytest.mark.parametrize("size", [1, 31, 128, 129, 1000, 49_152])
@pytest.mark.parametrize("kept", [1.0, 0.02])
def test_a_draw_is_the_inverse_of_the_whole_cumulative_sum(size, kept):
    """Wherever the sums of blocks end; a token without a weight is never drawn."""
    rng = np.random.default_rng(size)
    weights = np.exp(8 * rng.standard_normal((64, size))).astype(np.float32)
    weights *= rng.random((64, size)) < kept
    weights[:, rng.integers(size)] = 1e-6
    edges = [0.0, 1 - 2**-53, 0.5, 1e-300]
    uniform = np.concatenate([edges, rng.random(60)])
    tokens, mass = draw(torch.from_numpy(weights), torch.from_numpy(uniform))
    whole = weights.astype(np.float64).cumsum(1)
    assert np.allclose(mass.numpy(), whole[:, -1], rtol=1e-6)
    for row, token in enumerate(tokens.tolist()):
        assert weights[row, token] > 0
        point = uniform[row] * whole[row, -1]
        before = whole[row, token - 1] if token else 0.0
        rounding = 1e-6 * whole[row, -1]
        assert before - rounding <= point < whole[row, token] + rounding


def test_the_edges_of_the_uniform_never_reach_an_impossible_token():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    uniform = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    tokens = sample_tokens(logits, SamplingTable.build([SamplingParams(1)] * 2, 5), uniform).tokens
    assert tokens.tolist() == [1, 3]
