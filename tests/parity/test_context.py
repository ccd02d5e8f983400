"""Context parallelism: where slots stand, what each rank's queries see, and how a micro-batch is
shared out.
"""

from __future__ import annotations

import pytest
import torch
from cases import LENGTHS, make_batch
from torch import Tensor

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.model.attention import bucketed_attention
from backends.megatron.batch.cp_layout import Chunk, PackLayout, own_slots
from backends.megatron.batch.pack import make_micro_batch, pack_size, pad_lengths
from backends.megatron.parallel.cp_rank import CPRank
from rlcore.data.packing import padded_length

CPU = torch.device("cpu")
SCALE = 0.3


def places(size: int) -> list[CPRank]:
    return [CPRank(size, rank) for rank in range(size)]


def heads(total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 4 heads, keys and values of 2."""
    q, k, v = (torch.randn(total, n, 8, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
    return q, k, v


def run_cut(query: Tensor, key: Tensor, value: Tensor, cut: Chunk) -> Tensor:
    """What the variable-length kernel does: per sequence, causal, aligned to the end of the keys."""
    q = query if cut.queries is None else query[cut.queries]
    k, v = (x if cut.keys is None else x[cut.keys] for x in (key, value))
    outputs = []
    for (a, b), (c, d) in zip(
        cut.cu_queries.unfold(0, 2, 1).tolist(), cut.cu_keys.unfold(0, 2, 1).tolist()
    ):
        assert b - a <= cut.longest_queries
        assert d - c <= cut.longest_keys
        ki, vi = (x[c:d].transpose(0, 1).repeat_interleave(2, 0) for x in (k, v))
        late = torch.arange(d - c) > torch.arange(b - a)[:, None] + (d - c) - (b - a)
        scores = (q[a:b].transpose(0, 1) @ ki.transpose(1, 2) * SCALE).masked_fill(
            late, float("-inf")
        )
        outputs.append((scores.softmax(-1) @ vi).transpose(0, 1).reshape(b - a, -1))
    return torch.cat(outputs)


def by_cuts(query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float) -> Tensor:
    flat = torch.cat([run_cut(query, key, value, cut) for cut in layout.cuts.parts])
    return flat if layout.cuts.restore is None else flat[layout.cuts.restore]


@pytest.mark.parametrize("attend", [bucketed_attention, by_cuts])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [[1, 3, 0, 5, 20, 2], [9, 9, 9], [1]])
def test_the_ranks_together_attend_as_one(attend, size, chunks):
    torch.manual_seed(0)
    lengths = [n * CPRank(size).chunks for n in chunks]
    q, k, v = heads(sum(lengths))
    want = bucketed_attention(q, k, v, PackLayout.of_lengths(lengths, CPU), SCALE)
    slots = [own_slots(lengths, place) for place in places(size)]
    assert torch.cat(slots).sort().values.tolist() == list(range(sum(lengths)))
    keys, values = (torch.cat([x[own] for own in slots]) for x in (k, v))
    got = torch.empty_like(want)
    for place, own in zip(places(size), slots):
        got[own] = attend(q[own], keys, values, PackLayout.of_lengths(lengths, CPU, place), SCALE)
    torch.testing.assert_close(got, want)
    weight = torch.randn_like(want)
    gradients = [torch.autograd.grad((out * weight).sum(), (q, k, v)) for out in (got, want)]
    torch.testing.assert_close(*gradients)


def test_every_rank_holds_an_early_and_a_late_chunk():
    assert [own_slots([8, 4], place).tolist() for place in places(2)] == [
        [0, 1, 6, 7, 8, 11],
        [2, 3, 4, 5, 9, 10],
    ]
    positions = [
        PackLayout.of_lengths([8, 4], CPU, place).positions.tolist() for place in places(2)
    ]
    assert positions == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_attend_to_the_same_number_of_keys(size):
    """Causal pairs of front and back chunk: what one has fewer, the other has more."""
    cuts = [
        PackLayout.of_lengths([12 * size, 4 * size], CPU, place).cuts.parts
        for place in places(size)
    ]
    assert len({sum(int(cut.cu_keys[-1]) for cut in parts) for parts in cuts}) == 1


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("first", "last"), [(0, 9), (1, 5), (2, 3), (4, 4), (3, 8)])
def test_a_micro_batch_is_shared_out_whole(size, first, last):
    """Shifted before the split: the ranks' predictions are those of the whole, each once; pads
    stand in no count.
    """
    batch = make_batch()
    chunks = CPRank(size).chunks
    slots = pack_size(sum(padded_length(n, chunks) for n in LENGTHS[first:last]), chunks)
    parts = [make_micro_batch(batch, first, last, slots, CPU, place) for place in places(size)]
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
    ("missing", "longest", "multiple"), [(0, 8, 4), (4, 0, 4), (48, 20, 8), (64, 18, 4)]
)
def test_pads_are_cut_like_sequences(missing, longest, multiple):
    pads = pad_lengths(missing, longest, multiple)
    assert sum(pads) == missing
    assert all(
        0 < n <= padded_length(max(longest, 16), multiple) and n % multiple == 0 for n in pads
    )
