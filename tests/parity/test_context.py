"""Context parallelism: the slots of each rank, the keys of its queries, and its micro-batch."""

from __future__ import annotations

import pytest
import torch
from cases import LENGTHS, make_batch
from torch import Tensor

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.model.attention.core import bucketed_attention
from backends.megatron.batch.cp_layout import Chunk, PackLayout, own_slots
from backends.megatron.batch.pack import make_micro_batch, pack_size, pad_lengths
from backends.megatron.parallel.state import CPRank
from rlcore.data.packing.plan import padded_length

CPU = torch.device("cpu")
SCALE = 0.3


def cp_ranks(size: int) -> list[CPRank]:
    return [CPRank(size, rank) for rank in range(size)]


def heads(total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 4 heads, keys and values of 2."""
    q, k, v = (torch.randn(total, n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    return q, k, v


def run_chunk(query: Tensor, key: Tensor, value: Tensor, chunk: Chunk) -> Tensor:
    """Do as the variable-length kernel: per sequence, causal, aligned to the end of the keys."""
    q = query if chunk.queries is None else query[chunk.queries]
    k, v = (x if chunk.keys is None else x[chunk.keys] for x in (key, value))
    outputs = []
    for (a, b), (c, d) in zip(
        chunk.cu_queries.unfold(0, 2, 1).tolist(), chunk.cu_keys.unfold(0, 2, 1).tolist()
    ):
        assert b - a <= chunk.longest_queries
        assert d - c <= chunk.longest_keys
        ki, vi = (x[c:d].transpose(0, 1).repeat_interleave(2, 0) for x in (k, v))
        late = torch.arange(d - c) > torch.arange(b - a)[:, None] + (d - c) - (b - a)
        scores = (q[a:b].transpose(0, 1) @ ki.transpose(1, 2) * SCALE).masked_fill(
            late, float("-inf")
        )
        outputs.append((scores.softmax(-1) @ vi).transpose(0, 1).reshape(b - a, -1))
    return torch.cat(outputs)


def by_chunks(
    query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float
) -> Tensor:
    flat = torch.cat([run_chunk(query, key, value, chunk) for chunk in layout.chunks.parts])
    return flat if layout.chunks.restore is None else flat[layout.chunks.restore]


@pytest.mark.parametrize("attend", [bucketed_attention, by_chunks])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [[1, 3, 0, 5, 20, 2], [9, 9, 9], [1]])
def test_all_ranks_attend_as_one_rank(attend, size, chunks):
    torch.manual_seed(0)
    lengths = [n * CPRank(size).chunks for n in chunks]
    q, k, v = heads(sum(lengths))
    want = bucketed_attention(q, k, v, PackLayout.of_lengths(lengths, CPU), SCALE)
    slots = [own_slots(lengths, cp) for cp in cp_ranks(size)]
    assert torch.cat(slots).sort().values.tolist() == list(range(sum(lengths)))
    keys, values = (torch.cat([x[own] for own in slots]) for x in (k, v))
    got = torch.empty_like(want)
    for cp, own in zip(cp_ranks(size), slots):
        got[own] = attend(q[own], keys, values, PackLayout.of_lengths(lengths, CPU, cp), SCALE)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    gradients = [torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (got, want)]
    torch.testing.assert_close(*gradients)


def test_every_rank_holds_an_early_and_a_late_chunk():
    assert [own_slots([8, 4], cp).tolist() for cp in cp_ranks(2)] == [
        [0, 1, 6, 7, 8, 11],
        [2, 3, 4, 5, 9, 10],
    ]
    positions = [PackLayout.of_lengths([8, 4], CPU, cp).positions.tolist() for cp in cp_ranks(2)]
    assert positions == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_attend_to_the_same_number_of_keys(size):
    """Front and back chunk have causal pairs: one has as many more as the other has fewer."""
    all_parts = [
        PackLayout.of_lengths([12 * size, 4 * size], CPU, cp).chunks.parts for cp in cp_ranks(size)
    ]
    assert len({sum(int(chunk.cu_keys[-1]) for chunk in parts) for parts in all_parts}) == 1


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("first", "last"), [(0, 9), (1, 5), (2, 3), (4, 4), (3, 8)])
def test_the_ranks_share_a_whole_micro_batch(size, first, last):
    """Targets are shifted before the split, so each prediction is on one rank; no pad counts."""
    batch = make_batch()
    chunks = CPRank(size).chunks
    slots = pack_size(sum(padded_length(n, chunks) for n in LENGTHS[first:last]), chunks)
    parts = [make_micro_batch(batch, first, last, slots, CPU, cp) for cp in cp_ranks(size)]
    whole = make_micro_batch(batch, first, last, pack_size(sum(LENGTHS[first:last]), 1), CPU)
    assert {part.num_slots for part in parts} == {slots // size}
    assert sum(part.num_tokens for part in parts) == sum(LENGTHS[first:last]) == whole.num_tokens
    assert torch.cat([part.target_own for part in parts]).sort().values.tolist() == list(
        range(whole.num_trainable)
    )
    for part in parts:
        assert part.target_tokens.tolist() == whole.target_tokens[part.target_own].tolist()
        assert part.cu_seqlens.tolist() == whole.cu_seqlens.tolist()
        seen = whole.input_ids[0, whole.target_index[part.target_own]]
        assert part.input_ids[0, part.target_index].tolist() == seen.tolist()
        assert part.packed.layout is not None
        where = whole.packed.layout.positions[whole.target_index[part.target_own]]  # type: ignore[union-attr]
        assert part.packed.layout.positions[part.target_index].tolist() == where.tolist()


@pytest.mark.parametrize(
    ("missing", "longest", "multiple"),
    [(0, 8, 4), (4, 0, 4), (48, 20, 8), (64, 18, 4), (3, 0, 1), (50, 20, 1)],
)
def test_pads_are_split_like_sequences(missing, longest, multiple):
    pads = pad_lengths(missing, longest, multiple)
    assert sum(pads) == missing
    assert all(
        0 < n <= padded_length(max(longest, 16), multiple) and n % multiple == 0 for n in pads
    )
