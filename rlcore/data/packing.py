"""The plan of a step: which sequence goes to which optimizer step, rank and micro-batch.

Pure functions of the lengths, and of how sequences begin alike.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlcore.data.sharing import Beginnings
from rlcore.planning.shape import CostModel

EVEN = 1.01  # the heaviest rank by the mean, at which clusters are not cut any smaller


@dataclass(frozen=True)
class MinibatchPlan:
    """The layout of one optimizer step.

    `microbatches[d][k]` holds the sequences of micro-batch k on data-parallel rank d. Every rank
    has the same number of micro-batches.
    """

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]

    def sequences(self, rank: int) -> tuple[int, ...]:
        """Return all sequences of a rank."""
        return tuple(i for micro in self.microbatches[rank] for i in micro)


def padded_length(num_tokens: int, multiple: int) -> int:
    """Return the next multiple; 0 stays 0."""
    return -(-num_tokens // multiple) * multiple


def balance(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Put every item onto the lightest bin, the longest first (LPT, Graham 1969).

    Bins may stay empty.
    """
    order = sorted(range(len(costs)), key=costs.__getitem__, reverse=True)
    placed = [[item] for item in order[:bins]] + [[] for _ in range(bins - len(costs))]
    heap = [(costs[item], b) for b, item in enumerate(order[:bins])]
    heapq.heapify(heap)
    for item in order[bins:]:
        load, lightest = heap[0]
        placed[lightest].append(item)
        heapq.heapreplace(heap, (load + costs[item], lightest))
    return placed


def heaviest(costs: Sequence[float], bins: Sequence[Sequence[int]]) -> float:
    """Return the cost of the heaviest of the bins that `balance` filled."""
    return max(sum(costs[i] for i in items) for items in bins)


def fill(sizes: Sequence[int], items: Sequence[int], limit: int, bins: int) -> list[list[int]]:
    """Fill at least `bins` micro-batches of at most `limit` tokens, the largest item first.

    The lightest bin first keeps them even; a new one is opened only when none has room.
    """
    out: list[list[int]] = [[] for _ in range(bins)]
    lightest = [(0, k) for k in range(bins)]
    for i in sorted(items, key=lambda i: (-sizes[i], i)):
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


@dataclass(frozen=True)
class Pieces:
    """What goes to one rank and one micro-batch together: sequences that begin alike.

    Attributes:
        members: the sequences of each piece.
        tokens: of each piece, a shared one once.
        costs: of each piece.
    """

    members: list[list[int]]
    tokens: list[int]
    costs: list[float]


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
        pieces = Pieces([[i] for i in sequences], padded, [cost(n) for n in padded])
        shares = balance(pieces.costs, ranks)
    else:
        clusters = Clusters(beginnings.among(sequences), lengths, cost, pad)
        pieces, shares = clusters.balanced(ranks, max_tokens)
    bins = 1
    while True:
        packed = [fill(pieces.tokens, share, max_tokens, bins) for share in shares]
        needed = max(len(p) for p in packed)
        needed += -needed % multiple
        if all(len(p) == needed for p in packed):
            return MinibatchPlan(
                tuple(
                    tuple(tuple(i for piece in micro for i in pieces.members[piece]) for micro in p)
                    for p in packed
                )
            )
        bins = max(needed, bins + 1) if needed == bins else needed


class Clusters:
    """Sequences that begin alike, and how they are cut into pieces.

    A cut repeats the prefix behind it.
    """

    def __init__(
        self, beginnings: Beginnings, lengths: Sequence[int], cost: CostModel, pad: int
    ) -> None:
        self.order = beginnings.order
        size: Any = np.asarray(lengths, dtype=np.int64)[self.order]  # Any: `cost` takes arrays too
        shared = beginnings.shared
        self.whole_tokens = -(-size // pad) * pad
        self.own_tokens = -(-(size - shared) // pad) * pad
        self.whole_costs: Any = cost(size)
        self.own_costs = self.whole_costs - cost(shared)
        self.starts = np.flatnonzero(shared == 0)

    def balanced(self, ranks: int, max_tokens: int) -> tuple[Pieces, list[list[int]]]:
        """Cut as little as keeps the ranks even. Returns the pieces, and those of each rank.

        Without cuts, all tokens are computed once, but large clusters leave ranks uneven. So the
        largest piece is made smaller until the heaviest rank is as light as it gets.
        """
        pieces = self.cut(max_tokens, math.inf)
        ideal = sum(pieces.costs) / ranks
        best = balance(pieces.costs, ranks)
        lightest = heaviest(pieces.costs, best)
        for parts in (1, 2, 4, 8, 16):
            if lightest <= EVEN * ideal:
                break
            smaller = self.cut(max_tokens, ideal / parts)
            shares = balance(smaller.costs, ranks)
            load = heaviest(smaller.costs, shares)
            if load < lightest:
                lightest, pieces, best = load, smaller, shares
        return pieces, best

    def cut(self, max_tokens: int, max_cost: float) -> Pieces:
        """Cut the clusters that are larger than either; a sequence alone may be."""
        tokens_to = np.concatenate([[0], self.own_tokens.cumsum()])
        costs_to = np.concatenate([[0.0], self.own_costs.cumsum()])
        ends = np.concatenate([self.starts[1:], [len(self.order)]])
        # what a piece that begins at k has before its second sequence, less what stands before that
        token_base = self.whole_tokens - tokens_to[1:]
        cost_base = self.whole_costs - costs_to[1:]
        borders: list[int] = []
        tokens = token_base[self.starts] + tokens_to[ends]
        costs = cost_base[self.starts] + costs_to[ends]
        large = (tokens > max_tokens) | (costs > max_cost)
        for start, end, cut in zip(
            self.starts.tolist(), ends.tolist(), large.tolist(), strict=True
        ):
            borders.append(start)
            while cut:
                by_tokens = np.searchsorted(tokens_to, max_tokens - token_base[start], "right") - 1
                by_cost = np.searchsorted(costs_to, max_cost - cost_base[start], "right") - 1
                start = max(int(min(by_tokens, by_cost)), start + 1)
                cut = start < end
                if cut:
                    borders.append(start)
        first = np.array(borders, dtype=np.int64)
        last = np.concatenate([first[1:], [len(self.order)]])
        members = self.order.tolist()
        return Pieces(
            [members[a:b] for a, b in zip(borders, last.tolist(), strict=True)],
            (token_base[first] + tokens_to[last]).tolist(),
            (cost_base[first] + costs_to[last]).tolist(),
        )
