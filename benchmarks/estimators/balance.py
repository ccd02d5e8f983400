"""Times the load balancer beside Karmarkar-Karp differencing: 8192 sequences into 512 bins."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np
import torch
from estimators import batch as batches
from estimators.race import Entry, Goal, Section, race, ratio

from rlcore.data.packing.plan import balance

SEQUENCES = 8192
BINS = 512
LONGEST = 32768
OURS = "rlcore balance"
NUMPY = "Karmarkar-Karp, numpy"
VERL = "verl karmarkar_karp"


def measure(device: torch.device, verl: dict[str, ModuleType]) -> Section:
    lengths = batches.lengths_up_to(SEQUENCES, LONGEST).tolist()
    costs = [float(n) for n in lengths]
    worst = {
        OURS: _worst(balance(costs, BINS), costs),
        NUMPY: _worst(karmarkar_karp(costs, BINS), costs),
    }
    mean = sum(costs) / BINS

    def entry(what: str, run: Callable[[], object], *, once: bool = False) -> Entry:
        return Entry(what, run, f"worst bin {worst[what] / mean:.3f} x mean", once)

    entries = [
        entry(OURS, lambda: balance(costs, BINS)),
        entry(NUMPY, lambda: karmarkar_karp(costs, BINS)),
    ]
    if verl:
        theirs = verl["seqlen_balancing"].karmarkar_karp
        worst[VERL] = _worst(theirs(lengths, BINS, False), costs)
        entries.append(entry(VERL, lambda: theirs(lengths, BINS, False), once=True))
    found = race(
        f"{SEQUENCES} sequences, {BINS} bins, {sum(lengths):,} tokens", entries, torch.device("cpu")
    )
    rivals = [what for what in (NUMPY, VERL) if what in found]
    goals = [
        Goal(f"{rival} / balance", ratio(found, rival, OURS), 50.0, at_least=True)
        for rival in rivals
    ]
    goals += [
        Goal(f"worst bin / that of {rival}", worst[OURS] / worst[rival], 1.01) for rival in rivals
    ]
    note = "Log-normal lengths. rlcore's is longest first onto the lightest bin, with a heap."
    return Section("balancer", note, tuple(found.values()), tuple(goals))


def karmarkar_karp(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Largest differencing: the two partial partitions of the largest spread are merged, heaviest
    bin onto lightest.

    A partition is its bins' sums in falling order and, for each bin, a node: an item, or a pair of
    nodes, or -1 for none. So a merge copies no items; they are read off the tree in the end.
    """
    heap = []
    for item, cost in enumerate(costs):
        sums = np.zeros(bins)
        nodes = np.full(bins, -1)
        sums[0] = cost
        nodes[0] = item
        heap.append((-cost, item, sums, nodes))
    heapq.heapify(heap)
    pairs: list[tuple[int, int]] = []
    for merge in range(len(costs), 2 * len(costs) - 1):
        _, _, sums, nodes = heapq.heappop(heap)
        _, _, other_sums, other_nodes = heap[0]
        sums = sums + other_sums[::-1]
        other_nodes = other_nodes[::-1]
        joined = np.maximum(nodes, other_nodes)
        both = np.flatnonzero((nodes >= 0) & (other_nodes >= 0))
        joined[both] = np.arange(len(both)) + len(costs) + len(pairs)
        pairs += zip(nodes[both].tolist(), other_nodes[both].tolist())
        order = np.argsort(-sums, kind="stable")
        heapq.heapreplace(
            heap, (sums[order[-1]] - sums[order[0]], merge, sums[order], joined[order])
        )
    return [_items(root, len(costs), pairs) for root in heap[0][3].tolist()]


def _items(root: int, num_items: int, pairs: Sequence[tuple[int, int]]) -> list[int]:
    found = []
    ahead = [root] if root >= 0 else []
    while ahead:
        node = ahead.pop()
        if node < num_items:
            found.append(node)
        else:
            ahead += pairs[node - num_items]
    return found


def _worst(placed: Sequence[Sequence[int]], costs: Sequence[float]) -> float:
    assert sorted(item for part in placed for item in part) == list(range(len(costs)))
    return max(sum(costs[item] for item in part) for part in placed)
