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
        queries: int64, slots of this rank, run behind run.
        keys: int64, rows of the gathered keys, likewise.
        num_queries, num_keys: int64 [n], of each run.
        causal: whether the last keys of a run are its queries, which see those up to themselves;
            else they see all keys of their run.
    """

    queries: Tensor
    keys: Tensor
    num_queries: Tensor
    num_keys: Tensor
    causal: bool


def prefix_part(queries: Tensor, num_queries: Tensor, keys: Tensor, num_keys: Tensor) -> PrefixPart:
    """Join the runs behind one prefix, for every prefix.

    Args:
        queries: int64, slots, run behind run.
        keys: int64, rows, the prefixes of the runs; of the same prefix the same ones.
        num_queries, num_keys: int64 [n], some of which are 0.
    """
    begins = borders(num_queries).tolist()
    starts = borders(num_keys)[:-1]
    behind = num_keys.nonzero()[:, 0]
    last = keys[starts[behind] + num_keys[behind] - 1]
    # the last row of a prefix and its length name it
    runs_of: dict[tuple[int, int], list[int]] = {}
    for run, row, length in zip(behind.tolist(), last.tolist(), num_keys[behind].tolist()):
        runs_of.setdefault((row, length), []).append(run)
    rows: list[Tensor] = []
    prefixes: list[Tensor] = []
    for (_, length), runs in runs_of.items():
        rows += [queries[begins[run] : begins[run + 1]] for run in runs]
        start = int(starts[runs[0]])
        prefixes.append(keys[start : start + length])
    return PrefixPart(
        torch.cat(rows),
        torch.cat(prefixes),
        torch.stack([num_queries[runs].sum() for runs in runs_of.values()]),
        torch.tensor([length for _, length in runs_of]),
        causal=False,
    )
