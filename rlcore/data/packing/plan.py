"""The plan of a step: the optimizer step, rank and micro-batch of each sequence.

All functions are pure functions of the lengths, and of the prefixes that sequences share.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlcore.data.batch import RolloutBatch
from rlcore.data.packing.sharing import Beginnings, beginnings_of
from rlcore.planning.shape import CostModel


@dataclass(frozen=True)
class MinibatchPlan:
    """The layout of one optimizer step.

    `microbatches[d][k]` holds the sequences of micro-batch k on data-parallel rank d. Every rank
    has the same number of micro-batches.

    Attributes:
        shared: how many tokens sequences share with another one before them in their pack, which
            holds these tokens once; without zeros.
    """

    microbatches: tuple[tuple[tuple[int, ...], ...], ...]
    shared: tuple[int, ...] = ()

    def sequences(self, rank: int) -> tuple[int, ...]:
        """Return all sequences of a rank."""
        return tuple(i for micro in self.microbatches[rank] for i in micro)


def padded_length(num_tokens: int, multiple: int) -> int:
    """Return the next multiple of `multiple`; 0 stays 0."""
    return -(-num_tokens // multiple) * multiple


def fill(sizes: Sequence[int], items: Sequence[int], limit: int, bins: int) -> list[list[int]]:
    """Fill at least `bins` micro-batches of at most `limit` tokens, the largest item first.

    Each item goes into the lightest bin, which keeps them even; a bin is opened if none has room.
    """
    out: list[list[int]] = [[] for _ in range(bins)]
    lightest = [(0, k) for k in range(bins)]
    # Equal sizes stay in index order.
    for i in sorted(sorted(items), key=sizes.__getitem__, reverse=True):
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

    The steps are as even in their number of rollouts as whole groups allow; the number of segments
    of a rollout does not matter.

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
class PlanRules:
    """A backend's rules for its micro-batches.

    Attributes:
        ranks: data-parallel ranks.
        max_tokens: budget of a micro-batch; a single longer sequence gets its own.
        multiple: the number of micro-batches is rounded up to a multiple of this (the interleaved
            schedule needs a multiple of PP).
        pad: the own tokens of a sequence are padded to a multiple of this in a pack.
        share_prefixes: packs hold a prefix shared by sequences of a group only once.
    """

    ranks: int
    max_tokens: int
    cost: CostModel
    multiple: int = 1
    pad: int = 1
    share_prefixes: bool = False


def plan_minibatches(
    rules: PlanRules, batch: RolloutBatch, minibatches: Sequence[Sequence[int]]
) -> list[MinibatchPlan]:
    """Divide each optimizer step into micro-batches, balanced over the ranks by FLOPs.

    Args:
        minibatches: the sequences of each optimizer step.
    """
    beginnings = None
    if rules.share_prefixes:
        beginnings = beginnings_of(
            batch.tokens, batch.cu_tokens, batch.vectors["group_ids"], batch.routed_experts
        )
    lengths = batch.lengths.tolist()
    return [plan_minibatch(rules, sequences, lengths, beginnings) for sequences in minibatches]


def plan_minibatch(
    rules: PlanRules,
    sequences: Sequence[int],
    lengths: Sequence[int],
    beginnings: Beginnings | None = None,
) -> MinibatchPlan:
    """Balance one optimizer step over data-parallel ranks, and cut each share into micro-batches.

    Args:
        sequences: indices into `lengths`.
        lengths: tokens of every sequence.
        beginnings: shared prefixes of all sequences, if packs hold a shared prefix once.
    """
    if beginnings is None:
        padded = [padded_length(lengths[i], rules.pad) for i in sequences]
        costs = [rules.cost(n) for n in padded]
        pieces = Pieces([[i] for i in sequences], padded, costs, np.arange(0))
        shares = balance(costs, rules.ranks)
        shared = np.zeros(0, dtype=np.int64)
    else:
        clusters = Clusters(beginnings.among(sequences), lengths, rules.cost, rules.pad)
        pieces, shares = clusters.balanced(rules.ranks, rules.max_tokens)
        # How many tokens each sequence shares with the one before it in its piece.
        shared = clusters.shared.copy()
        shared[pieces.starts] = 0
    members = pieces.members.__getitem__
    bins = 1
    while True:
        packed = [fill(pieces.tokens, share, rules.max_tokens, bins) for share in shares]
        needed = max(len(p) for p in packed)
        needed += -needed % rules.multiple
        if all(len(p) == needed for p in packed):
            return MinibatchPlan(
                tuple(
                    tuple(tuple(chain.from_iterable(map(members, micro))) for micro in rank)
                    for rank in packed
                ),
                tuple(shared[shared > 0].tolist()),
            )
        bins = max(needed, bins + 1) if needed == bins else needed


# --- balance of the ranks -------------------------------------------------------------------------


EVEN = 1.01  # heaviest rank / mean at which clusters are not cut further


@dataclass(frozen=True)
class Pieces:
    """Units that go to one rank and micro-batch: sequences with a common prefix.

    Attributes:
        members: the sequences of each piece.
        tokens: the tokens of each piece, a shared token once.
        costs: the cost of each piece.
        starts: where each piece begins in the order of clusters.
    """

    members: list[list[int]]
    tokens: list[int]
    costs: list[float]
    starts: NDArray[np.int64]


def balance(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Put every item into the lightest bin, the largest first (LPT, Graham 1969).

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


class Clusters:
    """Sequences with common prefixes, and how they are cut into pieces.

    They stand in one order, cluster after cluster. A piece is a range of it; a piece that begins
    inside a cluster repeats the prefix.
    """

    def __init__(
        self, beginnings: Beginnings, lengths: Sequence[int], cost: CostModel, pad: int
    ) -> None:
        self.order = beginnings.order
        self.shared = beginnings.shared
        # Any: `cost` takes arrays too.
        size: Any = np.asarray(lengths, dtype=np.int64)[self.order]
        shared: Any = beginnings.shared
        self.starts = np.flatnonzero(shared == 0)
        self.tokens = _Ranges(-(-size // pad) * pad, -(-(size - shared) // pad) * pad)
        whole: Any = cost(size)
        self.costs = _Ranges(whole, whole - cost(shared))

    def balanced(self, ranks: int, max_tokens: int) -> tuple[Pieces, list[list[int]]]:
        """Cut as little as keeps the ranks even. Returns the pieces, and the pieces of each rank.

        Whole clusters repeat nothing, but a few large ones leave ranks uneven. In this case the
        order is cut at the ends of ranks, or all clusters are cut into smaller pieces, whichever is
        better.
        """
        pieces = self.cut(max_tokens)
        ideal = sum(pieces.costs) / ranks
        shares = balance(pieces.costs, ranks)
        best = heaviest(pieces.costs, shares), pieces, shares
        for parts in (0, 1, 2, 4, 8, 16):
            if best[0] <= EVEN * ideal:
                break
            if parts:
                pieces = self.cut(max_tokens, ideal / parts)
                shares = balance(pieces.costs, ranks)
            else:
                borders = self.in_order(ranks)
                pieces = self.cut(max_tokens, also=borders)
                shares = [[] for _ in range(ranks)]
                rank_of = np.searchsorted(borders, pieces.starts, "right") - 1
                for piece, rank in enumerate(rank_of.tolist()):
                    shares[rank].append(piece)
            load = heaviest(pieces.costs, shares)
            if load < best[0]:
                best = load, pieces, shares
        return best[1], best[2]

    def in_order(self, ranks: int) -> NDArray[np.int64]:
        """Return where the parts of at most `ranks` ranks begin, as even as possible."""
        low = self.costs.to[-1] / ranks
        high = self.costs.to[-1] + self.costs.whole.max(initial=0.0)
        for _ in range(24):
            middle = (low + high) / 2
            if len(self._parts(middle, ranks + 1)) > ranks:
                low = middle
            else:
                high = middle
        return np.array(self._parts(high, ranks), dtype=np.int64)

    def _parts(self, limit: float, most: int) -> list[int]:
        """Return the beginnings of at most `most` parts of at most `limit` each."""
        ends = self.costs.ends(limit)
        found: list[int] = []
        start = 0
        while start < len(self.order) and len(found) < most:
            found.append(start)
            start = int(ends[start])
        return found

    def cut(
        self, max_tokens: int, max_cost: float = math.inf, also: NDArray[np.int64] | None = None
    ) -> Pieces:
        """Cut the clusters that exceed either limit; a single sequence may exceed it.

        Args:
            also: further positions where pieces begin.
        """
        starts = self.starts if also is None else np.union1d(self.starts, also)
        ends = np.concatenate([starts[1:], [len(self.order)]])
        large = (self.tokens.of(starts, ends) > max_tokens) | (
            self.costs.of(starts, ends) > max_cost
        )
        following = np.minimum(self.tokens.ends(max_tokens), self.costs.ends(max_cost)).tolist()
        begins: list[int] = []
        for start, end, cut in zip(starts.tolist(), ends.tolist(), large.tolist(), strict=True):
            begins.append(start)
            if cut:
                begin = following[start]
                while begin < end:
                    begins.append(begin)
                    begin = following[begin]
        piece_starts = np.array(begins, dtype=np.int64)
        lasts = np.concatenate([piece_starts[1:], [len(self.order)]])
        members = self.order.tolist()
        return Pieces(
            [members[a:b] for a, b in zip(begins, lasts.tolist(), strict=True)],
            self.tokens.of(piece_starts, lasts).tolist(),
            self.costs.of(piece_starts, lasts).tolist(),
            piece_starts,
        )


class _Ranges:
    """Sums over ranges of an order, where the first item counts fully and later ones count less.

    Args:
        whole: each item's value as the first of a range.
        own: each item's value after its predecessor.
    """

    def __init__(self, whole: Any, own: Any) -> None:
        self.whole = whole
        self.to = np.concatenate([[0], own.cumsum()])
        # The difference if an item is the first of a range.
        self.base = whole - self.to[1:]

    def of(self, starts: Any, ends: Any) -> Any:
        """Return the sums of the ranges [start, end)."""
        return self.base[starts] + self.to[ends]

    def ends(self, limit: float) -> NDArray[np.int64]:
        """Return, for each start, the end of the longest range within `limit`, or of one item."""
        found = np.searchsorted(self.to, limit - self.base, "right") - 1
        ends: NDArray[np.int64] = np.maximum(found, np.arange(1, len(self.base) + 1))
        return ends
