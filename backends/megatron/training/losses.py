"""The weighted sums that one micro-batch contributes to an optimizer step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from backends.megatron.batch.local_batch import LocalBatch
from backends.megatron.batch.pack import MicroBatch
from backends.megatron.training.passes import Loss
from rlcore.algorithms import Moments, PolicyLoss, PolicyLossInputs, value_clipped, value_loss
from rlcore.config.sections.policy import CriticConfig

_PER_TOKEN = ("ref_logprobs", "rollout_logprobs", "versions")


def policy_loss(
    objective: Callable[[PolicyLossInputs], PolicyLoss],
    held: LocalBatch,
    minibatch: int,
    moments: Moments,
) -> Loss:
    """`sum(weights * objective)`; without assigned `old_logprobs` the step is on-policy and takes
    its own, detached.
    """
    stats = held.batch_stats(minibatch)

    def loss(micro: MicroBatch, output: Any) -> Tensor:
        logprobs, entropy = output
        given = {
            name: held.vectors[name][micro.rows] for name in _PER_TOKEN if name in held.vectors
        }
        if "sequence_ids" in held.vectors:
            given["sequence_ids"] = held.vectors["sequence_ids"][micro.sequences]
        old = held.vectors.get("old_logprobs")
        inputs = PolicyLossInputs(
            cu_seqlens=micro.cu_seqlens,
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else old[micro.rows],
            advantages=held.vector("advantages")[micro.rows],
            entropy=entropy,
            weights=held.vector("weights")[micro.rows],
            batch_stats=stats,
            **given,
        )
        result = objective(inputs)
        assert inputs.weights is not None
        moments.add_objective(result, inputs.weights)
        return (inputs.weights * result.per_token).sum()

    return loss


def critic_loss(config: CriticConfig, held: LocalBatch, moments: Moments) -> Loss:
    """`value_loss_coef * sum(weights * value_loss)`; the metric is without the coefficient."""

    def loss(micro: MicroBatch, output: Any) -> Tensor:
        returns = held.vector("returns")[micro.rows]
        weights = held.vector("weights")[micro.rows]
        old = held.vectors["values"][micro.rows] if "values" in held.vectors else None
        per_token = value_loss(output, old, returns, config.value_clip)
        moments.add_value_loss(
            per_token, weights, value_clipped(output, old, returns, config.value_clip)
        )
        return config.value_loss_coef * (weights * per_token).sum()

    return loss
