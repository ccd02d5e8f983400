"""Statistics of an optimizer step, the same on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from backends.megatron.batch.transfer import broadcast_json
from backends.megatron.parallel.state import ParallelState
from rlcore.algorithms import Moments


def shared_moments(moments: Moments, parallel: ParallelState) -> Moments:
    """Merge the last stages' moments over data parallelism and tell the other stages. Collective."""
    names = moments.names
    if parallel.is_last_stage and parallel.dp_size > 1:
        sums, maxima = moments.pack(names)
        dist.all_reduce(sums, group=parallel.dp_group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=parallel.dp_group)
        moments = Moments.unpack(names, sums, maxima)
    if parallel.pp_size > 1:
        packed = [names, *(x.tolist() for x in moments.pack(names))]
        names, sums, maxima = broadcast_json(
            packed, parallel.score_sources[parallel.dp_rank], parallel.replica_group
        )
        wide = (torch.tensor(x, dtype=torch.float64) for x in (sums, maxima))
        moments = Moments.unpack(names, *wide)
    return moments
