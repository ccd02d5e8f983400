"""Rank 0's arithmetic between the rollouts and the optimizer: KL, advantages, token weights, and what is logged of them.

Everything works on the whole batch, on compact vectors of trainable tokens; no rank, no mask, no padding is in sight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import (
    EstimatorInputs,
    PolicyLossInputs,
    approx_kl,
    build_estimator,
    estimator_keywords,
    loss_weights,
    whiten,
)
from rlcore.config import Config
from rlcore.config.derived import estimator_options, needs_critic, needs_reference, normalize_advantages
from rlcore.data.batch import RolloutBatch, ragged_index
from rlcore.errors import RunFailed
from rlcore.objective import Objective


class Credit:
    """Which passes a step needs, and what becomes of their results."""

    def __init__(self, config: Config, objective: Objective) -> None:
        self.config, self.objective = config, objective
        algorithm = config.algorithm
        name = algorithm.estimator.name
        self.estimator = build_estimator(name, **estimator_options(config, set(estimator_keywords(name))))
        needs = self.estimator.needs
        self.needs_reference = needs_reference(config, needs | objective.loss.needs)
        self.needs_critic = needs_critic(needs)
        self.normalize = normalize_advantages(config)
        one_update = algorithm.epochs * algorithm.minibatches == 1
        before_update = (
            bool(needs & {"kl", "logprobs"})
            or config.training.early_stopping
            or self.objective.loss.has_batch_stats
        )
        self.needs_logprobs = (
            algorithm.old_logprobs == "recompute"
            or before_update
            or (algorithm.old_logprobs == "auto" and not one_update)
        )

    def assign(self, batch: RolloutBatch, minibatches: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Per-token vectors for the optimizer, from the scores that `batch.vectors` already holds.

        Raises:
            RunFailed: no sequence of the batch has a trainable token.
        """
        if batch.num_trainable == 0:
            raise RunFailed(f"none of the {batch.num_sequences} sequences of this step has a trainable token")
        vectors = batch.vectors
        if "logprobs" in vectors and "ref_logprobs" in vectors:
            batch.set("kl", approx_kl(vectors["logprobs"], vectors["ref_logprobs"], self.config.algorithm.kl.reward_kind))
        if self.config.is_sft:
            advantages = torch.zeros(batch.num_trainable)
        else:
            advantages = self._advantages(batch)
        batch.set("advantages", advantages)
        if "old_logprobs" not in vectors:
            if self.config.algorithm.old_logprobs == "rollout":
                batch.set("old_logprobs", vectors["rollout_logprobs"])
            elif "logprobs" in vectors:
                batch.set("old_logprobs", vectors["logprobs"])
        batch.set("weights", self._weights(batch, minibatches))
        names = ("advantages", "weights", "old_logprobs", "ref_logprobs", "values", "returns")
        return {name: vectors[name] for name in names if name in vectors} | self._batch_stats(batch, minibatches)

    def _advantages(self, batch: RolloutBatch) -> Tensor:
        given: dict[str, Any] = {
            name: batch.vectors[name]
            for name in ("logprobs", "ref_logprobs", "rollout_logprobs", "kl", "values", "versions", "rollout_ids")
            if name in batch.vectors
        }
        inputs = EstimatorInputs(
            cu_seqlens=batch.cu_seqlens, rewards=batch.vectors["rewards"], group_ids=batch.vectors["group_ids"], **given
        )
        result = self.estimator(inputs)
        if self.needs_critic and result.returns is not None:
            batch.set("returns", result.returns)
        return whiten(result.advantages) if self.normalize else result.advantages

    def _weights(self, batch: RolloutBatch, minibatches: Sequence[Sequence[int]]) -> Tensor:
        """One weight a token, taken over the optimizer step that the token belongs to."""
        loss = self.config.algorithm.loss
        weights = torch.zeros(batch.num_trainable)
        for rows in minibatches:
            part = torch.as_tensor(rows, dtype=torch.int64)
            lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1])[part]
            cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            weights[ragged_index(batch.cu_seqlens, part)] = loss_weights(
                loss.aggregation, cu, norm_length=loss.norm_length
            ).float()
        return weights

    def _batch_stats(self, batch: RolloutBatch, minibatches: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """What the loss asks to know of each optimizer step as a whole, as `batch_stats/<minibatch>/<name>`."""
        if not self.objective.loss.has_batch_stats:
            return {}
        stats: dict[str, Tensor] = {}
        for k, rows in enumerate(minibatches):
            part = batch.select(rows)
            inputs = PolicyLossInputs(
                cu_seqlens=part.cu_seqlens,
                logprobs=part.vectors["old_logprobs"],
                old_logprobs=part.vectors["old_logprobs"],
                advantages=part.vectors["advantages"],
                weights=part.vectors["weights"],
            )
            stats |= {f"batch_stats/{k}/{name}": value for name, value in self.objective.batch_stats(inputs).items()}
        return stats
