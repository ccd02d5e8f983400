"""The few sequences of a micro-batch on which the distance of a step is measured."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.batch.local_batch import LocalBatch, LocalMinibatch
    from backends.megatron.parallel.state import ALONE

from rlcore.data.batch import RolloutBatch


def local_batch(
    prompts: list[int], trainable: list[int], offsets: list[int], *, seed: int, stages: int
) -> LocalBatch:
    """What a rank holds: sequences of a prompt and a response, packed between `offsets`."""
    lengths = torch.tensor([a + b for a, b in zip(prompts, trainable)])
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    generator = torch.Generator().manual_seed(seed)
    mask = [torch.arange(a + b) >= a for a, b in zip(prompts, trainable)]
    local = LocalBatch.__new__(LocalBatch)
    local.batch = RolloutBatch(
        tokens=torch.randint(1, 99, (int(cu[-1]),), generator=generator, dtype=torch.int32),
        cu_tokens=cu,
        loss_mask=torch.cat(mask),
    )
    local.minibatches = [LocalMinibatch(offsets, int(cu[-1]))]
    local._parallel = SimpleNamespace(pp_size=stages, cp=ALONE)  # type: ignore[assignment]
    local._device = torch.device("cpu")
    local._pad_multiple = 1
    local._share_prefixes = True
    local.mtp_coef = 0.0
    local._packs = {}
    return local


@given(
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    tokens=st.integers(1, 30),
    seed=st.integers(0, 9),
    stages=st.sampled_from([1, 2]),
)
def test_an_excerpt_is_the_shortest_run_of_sequences_with_enough_tokens(
    sizes: list[tuple[int, int]], cuts: list[int], tokens: int, seed: int, stages: int
) -> None:
    count = len(sizes)
    offsets = [0, *sorted(min(cut, count) for cut in cuts), count]
    prompts, trainable = map(list, zip(*sizes))
    local = local_batch(prompts, trainable, offsets, seed=seed, stages=stages)
    whole = local.micro_batches(0)
    for micro, part in zip(whole, local.excerpts(whole, tokens), strict=True):
        inside = range(micro.sequences.start, micro.sequences.stop)
        taken = range(part.sequences.start, part.sequences.stop)
        assert set(taken) <= set(inside)
        wanted = min(tokens, micro.num_trainable)
        assert part.num_trainable == sum(trainable[i] for i in taken) >= wanted
        # Without its last sequence there are too few.
        assert part.num_trainable == wanted or sum(trainable[i] for i in taken[:-1]) < wanted
        own = slice(part.rows.start - micro.rows.start, part.rows.stop - micro.rows.start)
        assert torch.equal(part.target_tokens, micro.target_tokens[own])


def test_the_contents_choose_where_an_excerpt_begins() -> None:
    found = set()
    for seed in range(20):
        local = local_batch([2] * 8, [4] * 8, [0, 8], seed=seed, stages=1)
        [part] = local.excerpts(local.micro_batches(0), 8)
        again = local_batch([2] * 8, [4] * 8, [0, 8], seed=seed, stages=1)
        [same] = again.excerpts(again.micro_batches(0), 8)
        assert part.sequences == same.sequences
        found.add(part.sequences.start)
    assert len(found) > 3


@pytest.mark.parametrize("stages", [1, 2])
def test_stages_get_packs_of_one_size(stages: int) -> None:
    local = local_batch([3] * 6, [1, 9, 2, 8, 5, 5], [0, 3, 6], seed=1, stages=stages)
    parts = local.excerpts(local.micro_batches(0), 4)
    sizes = {part.num_slots for part in parts}
    assert len(sizes) == (1 if stages == 2 else len(parts))
