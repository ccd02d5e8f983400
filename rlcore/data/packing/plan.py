"""The plan of a step: which sequence goes to which optimizer step, rank and micro-batch.

Pure functions of the lengths, and of how sequences begin alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from rlcore.data.packing.clusters import Clusters, Pieces, balance
from rlcore.data.packing.sharing import Beginnings
from rlcore.planning.shape import CostModel


@dataclass(frozen=True)
class MinibatchPlan:
    """The layout of one optimizer step.

    `microbatches[d][k]` holds the sequences of micro-batch k on data-parallel rank d. Every rank
    has the same number of micro-batches.

    Attributes:
        shared_tokens: the tokens that packs hold for several sequences at once, not counting the
            first of each.
        shared_squares: the sum over sequences of the squares of their number.
    """

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    shared_tokens: int = 0
    shared_squares: int = 0

    def sequences(self, rank: int) -> tuple[int, ...]:
        """Return all sequences of a rank."""
        return tuple(i for micro in self.microbatches[rank] for i in micro)


def padded_length(num_tokens: int, multiple: int) -> int:
    """Return the next multiple; 0 stays 0."""
    return -(-num_tokens // multiple) * multiple


def fill(sizes: Sequence[int], items: Sequence[int], limit: int, bins: int) -> list[list[int]]:
    """Fill at least `bins` micro-batches of at most `limit` tokens, the largest item first.

    The lightest bin first keeps them even; a new one is opened only when none has room.
    """
    out: list[list[int]] = [[] for _ in range(bins)]
    lightest = [(0, k) for k in range(bins)]
    for i in sorted(sorted(items), key=sizes.__getitem__, reverse=True):  # ties in their order
        load, k = lightest[0]
        if load and load + sizes[i] > limit:
            heapq.heappush(lightest, (sizes[i], len(out)))
            out.append([i])
        else:
            heapq.heapreplace(lightest, (load + sizes[i], k))
            out[k].append(i)
    return out


def split_minibatches(
    minibatches: int, group_ids: torch.Tensor, rollout_ids: torch.Tensor, *, seed: int
) -> list[list[int]]:
    """Choose the sequences of each optimizer step: whole groups, shuffled by `seed`.

    The steps are as even in number of rollouts as groups allow: it does not matter into how many
    segments a rollout was cut.

    Args:
        group_ids, rollout_ids: int64 [B].
    """
    if minibatches == 1:
        return [list(range(len(group_ids)))]
    groups: dict[int, list[int]] = {}
    rollouts: dict[int, set[int]] = {}
    for i, (group, rollout) in enumerate(zip(group_ids.tolist(), rollout_ids.tolist())):
        groups.setdefault(group, []).append(i)
        rollouts.setdefault(group, set()).add(rollout)
    generator = torch.Generator().manual_seed(seed)
    names = list(groups)
    order = [names[g] for g in torch.randperm(len(names), generator=generator).tolist()]
    parts = balance([float(len(rollouts[g])) for g in order], minibatches)
    return [sorted(i for k in part for i in groups[order[k]]) for part in parts]


def plan_minibatch(
    sequences: Sequence[int],
    lengths: Sequence[int],
    *,
    ranks: int,
    max_tokens: int,
    cost: CostModel,
    multiple: int = 1,
    pad: int = 1,
    beginnings: Beginnings | None = None,
) -> MinibatchPlan:
    """Balance one optimizer step over data-parallel ranks, and cut each share into micro-batches.

    Args:
        sequences: indices into `lengths`.
        lengths: tokens of every sequence.
        max_tokens: budget of a micro-batch; a single longer sequence gets one of its own.
        multiple: the number of micro-batches is rounded up to a multiple of this (the interleaved
            schedule needs a multiple of PP).
        pad: the own tokens of a sequence are padded to a multiple of this in a pack.
        beginnings: of all sequences, where packs hold a shared prefix once.
    """
    if beginnings is None:
        padded = [padded_length(lengths[i], pad) for i in sequences]
        pieces = Pieces([[i] for i in sequences], padded, [cost(n) for n in padded], np.arange(0))
        shares = balance(pieces.costs, ranks)
        shared = np.zeros(0, dtype=np.int64)
    else:
        clusters = Clusters(beginnings.among(sequences), lengths, cost, pad)
        pieces, shares = clusters.balanced(ranks, max_tokens)
        shared = clusters.shared_in(pieces)
    members = pieces.members.__getitem__
    bins = 1
    while True:
        packed = [fill(pieces.tokens, share, max_tokens, bins) for share in shares]
        needed = max(len(p) for p in packed)
        needed += -needed % multiple
        if all(len(p) == needed for p in packed):
            return MinibatchPlan(
                tuple(
                    tuple(tuple(chain.from_iterable(map(members, micro))) for micro in rank)
                    for rank in packed
                ),
                shared_tokens=int(shared.sum()),
                shared_squares=int((shared * shared).sum()),
            )
        bins = max(needed, bins + 1) if needed == bins else needed
