from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcore.algorithms import prompt_overlap, token_uniform
from rlcore.algorithms.token_hash import mix64

from .helpers import LENGTHS, cu
from .reference_losses import draw, splitmix

any_int64 = st.integers(-(2**63), 2**63 - 1)


def test_the_published_outputs_of_splitmix64() -> None:
    """Those of seed 0: states are the multiples of the golden constant."""
    golden = 0x9E3779B97F4A7C15 - 2**64
    states = torch.arange(1, 4) * golden
    expected = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [x % 2**64 for x in mix64(states).tolist()] == list(expected)


@settings(max_examples=50, deadline=None)
@given(numbers=st.lists(any_int64, max_size=8))
def test_wrapping_arithmetic_is_that_of_unsigned_integers(numbers: list[int]) -> None:
    mixed = mix64(torch.tensor(numbers, dtype=torch.int64)).tolist()
    assert [x % 2**64 for x in mixed] == [splitmix(x % 2**64) for x in numbers]


@settings(max_examples=50, deadline=None)
@given(sequences=st.lists(st.tuples(any_int64, st.integers(0, 4)), max_size=6))
def test_the_slow_reference(sequences: list[tuple[int, int]]) -> None:
    ids = torch.tensor([identity for identity, _ in sequences], dtype=torch.int64)
    numbers = token_uniform(ids, cu([n for _, n in sequences]))
    assert numbers.dtype == torch.float64
    assert numbers.tolist() == [draw(identity, t) for identity, n in sequences for t in range(n)]


def test_a_token_keeps_its_number_in_any_order_and_company() -> None:
    ids = torch.arange(len(LENGTHS)) * 17 - 40
    together = token_uniform(ids, cu(LENGTHS)).split(list(LENGTHS))
    for b in reversed(range(len(LENGTHS))):
        assert torch.equal(token_uniform(ids[b : b + 1], cu((LENGTHS[b],))), together[b])
    longer = token_uniform(ids[:1], cu((LENGTHS[0] + 3,)))
    assert torch.equal(longer[: LENGTHS[0]], together[0]), (
        "nor does the length of its sequence matter"
    )


def test_known_size_changes_nothing() -> None:
    ids = torch.arange(len(LENGTHS))
    assert torch.equal(
        token_uniform(ids, cu(LENGTHS), sum(LENGTHS)), token_uniform(ids, cu(LENGTHS))
    )
    assert torch.equal(token_uniform(ids.int(), cu(LENGTHS).int()), token_uniform(ids, cu(LENGTHS)))


def test_uniform_and_uncorrelated() -> None:
    """Identities and positions counted from 0: 64 cells within five sigma, neighbours unrelated."""
    sequences = 256
    n = 256
    grid = token_uniform(torch.arange(sequences), cu((n,) * sequences)).view(sequences, n)
    assert grid.min() >= 0.0
    assert grid.max() < 1.0
    assert grid.unique().numel() == grid.numel()
    cells = torch.histc(grid, bins=64, min=0.0, max=1.0)
    expected = grid.numel() / 64
    assert ((cells - expected).abs() < 5 * expected**0.5).all()
    for a, b in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1]), (grid, grid.T)):
        off = ~torch.eye(*a.shape, dtype=torch.bool)
        correlation = torch.corrcoef(torch.stack([a[off], b[off]]))[0, 1]
        assert correlation.abs() < 5 / grid.numel() ** 0.5 * 2**0.5


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device: the hash was not compared between devices",
)
def test_the_same_bits_on_a_gpu() -> None:
    ids = torch.arange(len(LENGTHS)) * 2**55 - 40
    on_gpu = token_uniform(ids.cuda(), cu(LENGTHS).cuda(), sum(LENGTHS))
    assert torch.equal(on_gpu.cpu(), token_uniform(ids, cu(LENGTHS)))


# --- n-grams of the prompt ------------------------------------------------------------------------


def slow_overlap(prompt: list[int], response: list[int]) -> float:
    """The same, one n-gram at a time."""
    grams = {tuple(prompt[i : i + 3]) for i in range(len(prompt) - 2)}
    own = [tuple(response[i : i + 3]) for i in range(len(response) - 2)][-510:]
    return sum(gram in grams for gram in own) / len(own) if own else 0.0


def flattened(
    pairs: list[tuple[list[int], list[int]]], groups: list[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens = torch.tensor([t for pair in pairs for part in pair for t in part], dtype=torch.int32)
    mask = torch.tensor([k for pair in pairs for k in (0, 1) for _ in pair[k]], dtype=torch.bool)
    lengths = torch.tensor([0, *(len(a) + len(b) for a, b in pairs)])
    return tokens, lengths.cumsum(0), mask, torch.tensor(groups)


def test_the_overlap_is_that_of_a_count_by_hand() -> None:
    random = Random(3)

    def text(most: int) -> list[int]:
        return [random.randrange(4) for _ in range(random.randrange(1, most))]

    # few symbols, so that many n-grams are found again
    pairs = [(text(30), text(20)) for _ in range(60)]
    pairs += [(text(30), []), (text(30), [1]), ([1], text(20)), (text(30), text(1400))]
    found = prompt_overlap(*flattened(pairs, list(range(len(pairs)))))
    expected = [slow_overlap(*pair) for pair in pairs]
    assert found.tolist() == pytest.approx(expected)
    assert len({round(one, 3) for one in expected}) > 10


def test_an_overlap_crosses_no_border() -> None:
    prompt = [1, 2, 3, 4]
    pairs = [(prompt, [3, 4, 9]), (prompt, [9, 1, 2]), ([7, 7, 7, 7], [1, 2, 3])]
    assert prompt_overlap(*flattened(pairs, [0, 0, 1])).tolist() == [0.0, 0.0, 0.0]
    pairs = [(prompt, [9, 1, 2, 3]), (prompt, [2, 3, 4])]
    assert prompt_overlap(*flattened(pairs, [0, 0])).tolist() == [0.5, 1.0]
    # a tool's output, between two turns, is no response, and no prompt either
    tokens, cu, mask, groups = flattened([(prompt, [1, 2, 3, 4, 1, 2])], [0])
    mask[6:8] = False
    assert prompt_overlap(tokens, cu, mask, groups).tolist() == [0.0]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2]])
def test_what_is_too_short_has_no_overlap(tokens: list[int]) -> None:
    assert prompt_overlap(*flattened([(tokens, [])], [0])).tolist() == [0.0]
