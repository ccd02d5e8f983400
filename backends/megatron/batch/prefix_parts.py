"""The queries of a pack with shared prefixes in two parts, each of which sees keys of its own.

One part is the sequences' own tokens, each behind the own ones before it. The other is, for each
prefix, all queries behind it as one run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.megatron.batch.ragged import borders


@dataclass(frozen=True)
class PrefixPart:
    """Runs of queries with the keys of each.

    Attributes:
        queries: int64, slots, run behind run.
        keys: int64, slots, likewise.
        num_queries, num_keys: int64 [n], of each run.
        causal: whether a run's queries are its keys, and see those up to themselves; else they see
            all keys of their run.
    """

    queries: Tensor
    keys: Tensor
    num_queries: Tensor
    num_keys: Tensor
    causal: bool


def prefix_parts(
    queries: Tensor, num_queries: Tensor, keys: Tensor, num_keys: Tensor
) -> tuple[PrefixPart, ...]:
    """Divide runs of queries, whose last keys are themselves, into their two parts.

    Args:
        queries: int64, slots, run behind run; likewise `keys`, which end with the run's queries.
        num_queries, num_keys: int64 [n].
    """
    own = PrefixPart(queries, queries, num_queries, num_queries, causal=True)
    before = num_keys - num_queries
    if not before.any():
        return (own,)
    key_borders = borders(num_keys)[:-1]
    query_borders = borders(num_queries).tolist()
    # the last slot of a path and its length name the path
    runs_of: dict[tuple[int, int], list[int]] = {}
    behind = before.nonzero()[:, 0]
    last = keys[key_borders[behind] + before[behind] - 1]
    for run, slot, length in zip(behind.tolist(), last.tolist(), before[behind].tolist()):
        runs_of.setdefault((slot, length), []).append(run)
    begins = key_borders.tolist()
    rows: list[Tensor] = []
    paths: list[Tensor] = []
    counts: list[int] = []
    lengths: list[int] = []
    for (_, length), runs in runs_of.items():
        rows += [queries[query_borders[run] : query_borders[run + 1]] for run in runs]
        counts.append(int(num_queries[runs].sum()))
        paths.append(keys[begins[runs[0]] : begins[runs[0]] + length])
        lengths.append(length)
    return own, PrefixPart(
        torch.cat(rows), torch.cat(paths), torch.tensor(counts), torch.tensor(lengths), causal=False
    )
