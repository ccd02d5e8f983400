"""Which rank writes a weight that several replicas hold alike.

Megatron has the first replica write all weights, while the others wait. Here the weights are dealt
out to the replicas by size. Every rank computes the same deal, without communication: replicas hold
the same weights in the same order. Who has written a tensor does not matter to who reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from backends.megatron.parallel.state import ParallelState

_EXPERTS = ".experts."


def deal_to_replicas(weights: Mapping[str, Any], parallel: ParallelState) -> None:
    """Deal the weights of a sharded state out to the replicas that hold them, in place.

    The last number of a `replica_id` says which data-parallel replica this is; replica 0 writes.
    Optimizer states that are not divided over replicas go with their weight.
    """
    entries = sharded_entries(weights)
    experts = [entry for entry in entries if _EXPERTS in entry.key]
    others = [entry for entry in entries if _EXPERTS not in entry.key]
    for group, replicas in (
        (others, parallel.dp_size * parallel.cp_size),
        (experts, parallel.edp_size),
    ):
        written = [0] * replicas
        for entry in sorted(group, key=lambda entry: -entry.data.nbytes):
            writer = written.index(min(written))
            written[writer] += entry.data.nbytes
            *before, replica = entry.replica_id
            entry.replica_id = (*before, (replica - writer) % replicas)


def sharded_entries(weights: Mapping[str, Any]) -> list[ShardedTensor | ShardedTensorFactory]:
    """Return what a sharded state of a model holds of its parameters, in their order."""
    return [
        entry
        for entry in nested_values(dict(weights))
        if isinstance(entry, ShardedTensor | ShardedTensorFactory)
    ]
