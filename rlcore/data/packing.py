"""The plan of a step: which sequence goes to which optimizer step, rank and micro-batch.

Pure functions of the lengths.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlcore.planning.shape import CostModel


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


def fill(lengths: Sequence[int], items: Sequence[int], limit: int, bins: int) -> list[list[int]]:
    """Fill at least `bins` micro-batches of at most `limit` tokens, the longest sequence first."""
    loads: list[int] = [0] * bins
    out: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(items, key=lambda i: (-lengths[i], i)):
        # The lightest bin first keeps them even; a new one is opened only when none has room.
        k = min(range(len(loads)), key=lambda b: (loads[b], b))
        if loads[k] and loads[k] + lengths[i] > limit:
            loads.append(0)
            out.append([])
            k = len(loads) - 1
        loads[k] += lengths[i]
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
) -> MinibatchPlan:
    """Balance one optimizer step over data-parallel ranks, and cut each share into micro-batches.

    Args:
        sequences: indices into `lengths`.
        lengths: tokens of every sequence as it stands in a pack, padding inside the pack included.
        max_tokens: budget of a micro-batch; a single longer sequence gets one of its own.
        multiple: the number of micro-batches is rounded up to a multiple of this (the interleaved
            schedule needs a multiple of PP).
    """
    shares = [
        [sequences[i] for i in part]
        for part in balance([cost(lengths[i]) for i in sequences], ranks)
    ]
    bins = 1
    while True:
        packed = [fill(lengths, share, max_tokens, bins) for share in shares]
        needed = max(len(p) for p in packed)
        needed += -needed % multiple
        if all(len(p) == needed for p in packed):
            return MinibatchPlan(tuple(tuple(tuple(micro) for micro in rank) for rank in packed))
        bins = max(needed, bins + 1) if needed == bins else needed
