"""The losses of a micro-batch, and the metrics of an optimizer step that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.batch.local_batch import LocalBatch
from backends.megatron.batch.pack import MicroBatch
from backends.megatron.parallel.agreement import broadcast_json
from backends.megatron.parallel.state import ParallelState
from backends.megatron.training.passes import Loss
from rlcore.algorithms import Moments, PolicyLoss, PolicyLossInputs, value_clipped, value_loss
from rlcore.config.sections.policy import CriticConfig

_PER_TOKEN = ("ref_logprobs", "rollout_logprobs", "versions")


def policy_loss(
    objective: Callable[[PolicyLossInputs], PolicyLoss],
    batch: LocalBatch,
    minibatch: int,
    moments: Moments,
) -> Loss:
    """The policy's loss of a micro-batch: `sum(weights * objective)`.

    Without assigned `old_logprobs` the step is on-policy and takes its own, detached.
    """
    stats = batch.batch_stats(minibatch)

    def loss(micro: MicroBatch, output: Any) -> Tensor:
        logprobs, entropy = output
        given = {
            name: batch.vectors[name][micro.rows] for name in _PER_TOKEN if name in batch.vectors
        }
        if "sequence_ids" in batch.vectors:
            given["sequence_ids"] = batch.vectors["sequence_ids"][micro.sequences]
        old = batch.vectors.get("old_logprobs")
        inputs = PolicyLossInputs(
            cu_seqlens=micro.cu_seqlens,
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else old[micro.rows],
            advantages=batch.vector("advantages")[micro.rows],
            entropy=entropy,
            weights=batch.vector("weights")[micro.rows],
            batch_stats=stats,
            **given,
        )
        result = objective(inputs)
        assert inputs.weights is not None
        moments.add_objective(result, inputs.weights)
        return (inputs.weights * result.per_token).sum()

    return loss


def critic_loss(config: CriticConfig, batch: LocalBatch, moments: Moments) -> Loss:
    """The critic's loss of a micro-batch: `value_loss_coef * sum(weights * value_loss)`.

    The metric is without the coefficient.
    """

    def loss(micro: MicroBatch, output: Any) -> Tensor:
        returns = batch.vector("returns")[micro.rows]
        weights = batch.vector("weights")[micro.rows]
        old = batch.vectors["values"][micro.rows] if "values" in batch.vectors else None
        per_token = value_loss(output, old, returns, config.value_clip)
        moments.add_value_loss(
            per_token, weights, value_clipped(output, old, returns, config.value_clip)
        )
        return config.value_loss_coef * (weights * per_token).sum()

    return loss


def shared_moments(moments: Moments, parallel: ParallelState) -> Moments:
    """Merge the moments of all replicas and send them to every pipeline stage. Collective."""
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
