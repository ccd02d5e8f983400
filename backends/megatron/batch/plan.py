"""Divides the sequences of optimizer steps into micro-batches, as layout and budget allow."""

from __future__ import annotations

from collections.abc import Sequence

from backends.megatron.parallel.state import ParallelState
from rlcore.config import Config
from rlcore.config.derived import micro_batch_tokens
from rlcore.data.packing.plan import MinibatchPlan, plan_minibatch
from rlcore.data.packing.sharing import Beginnings
from rlcore.planning.shape import CostModel


def plan_minibatches(
    config: Config,
    parallel: ParallelState,
    cost: CostModel,
    lengths: Sequence[int],
    minibatches: Sequence[Sequence[int]],
    beginnings: Beginnings | None = None,
) -> list[MinibatchPlan]:
    """Divide each optimizer step into micro-batches, balanced over the replicas by FLOPs.

    Not collective.

    Args:
        lengths: tokens of every sequence.
        minibatches: the sequences of each optimizer step.
        beginnings: of all sequences, where packs hold a shared prefix once.
    """
    layout = config.policy.parallel
    return [
        plan_minibatch(
            sequences,
            lengths,
            ranks=parallel.dp_size,
            max_tokens=micro_batch_tokens(config),
            cost=cost,
            multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
            pad=parallel.cp.chunks,
            beginnings=beginnings,
        )
        for sequences in minibatches
    ]
