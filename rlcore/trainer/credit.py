"""Credit assignment on rank 0: KL, advantages and loss weights, between rollouts and optimizer.

It works on the whole batch, on compact vectors of trainable tokens, without ranks, masks or
padding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import (
    Advantages,
    EstimatorInputs,
    PolicyLossInputs,
    approx_kl,
    build_estimator,
    estimator_keywords,
    estimator_plugin,
    loss_weights,
    mask_weights,
    normalize_advantages,
    stale_tokens,
)
from rlcore.config import Config
from rlcore.config.derived import estimator_options, passes, per_rollout_loss
from rlcore.data.batch import RolloutBatch, ragged_index
from rlcore.errors import EmptyBatch, RunFailed
from rlcore.trainer.objective import Objective, rules_of


class CreditAssignment:
    """Names the scoring passes that a step needs, and turns their results into credit."""

    def __init__(self, config: Config, objective: Objective) -> None:
        self.config = config
        self.objective = objective
        algorithm = config.algorithm
        name = algorithm.estimator.name
        self.estimator = build_estimator(
            name, **estimator_options(config, set(estimator_keywords(name)))
        )
        needs = self.estimator.needs
        loss = objective.loss
        self.passes = passes(
            config,
            estimator_needs=needs,
            loss_needs=loss.needs,
            whole_step_loss=loss.has_batch_stats,
        )
        # The columns of `reward_parts`; empty if the estimator does not read them.
        self.reward_parts = [*config.reward.parts] if "reward_parts" in self.estimator.takes else []
        self.needs_baseline = not config.learns_from_rows and "baseline_rewards" in needs
        self.normalization = algorithm.normalize_advantages or estimator_plugin(name).normalization

    def assign(
        self, batch: RolloutBatch, minibatches: Sequence[Sequence[int]]
    ) -> dict[str, Tensor]:
        """Compute the per-token vectors for the optimizer from the scores in `batch.vectors`.

        Raises:
            EmptyBatch: no sequence of the batch has a trainable token.
            RunFailed: the estimator broke a rule: it modified its inputs, or returned a wrong
                shape, a non-finite number, or no targets for the critic.
        """
        if batch.num_trainable == 0:
            raise EmptyBatch(
                f"none of the {batch.num_sequences} sequences of this step has a trainable token"
            )
        vectors = batch.vectors
        if self.config.is_sft:
            batch.set("advantages", torch.zeros(batch.num_trainable))
        else:
            estimate = self.advantages(batch)
            batch.set("advantages", estimate.advantages)
            batch.metrics = {name: float(of.mean()) for name, of in estimate.metrics.items()}
            if self.passes.critic and estimate.returns is not None:
                batch.set("returns", estimate.returns)
            if self.config.algorithm.old_logprobs == "rollout":
                batch.set("old_logprobs", vectors["rollout_logprobs"])
            elif "logprobs" in vectors:
                batch.set("old_logprobs", vectors["logprobs"])
            correction = self.objective.correction
            if correction is not None and {"old_logprobs", "rollout_logprobs"} <= vectors.keys():
                # The ranks compute their own factors; this copy is for the step's record.
                found = correction(
                    vectors["old_logprobs"], vectors["rollout_logprobs"], batch.cu_seqlens
                )
                batch.set("correction", found.weights * found.keep)
        batch.set("weights", self._weights(batch, minibatches))
        names = ("advantages", "weights", "old_logprobs", "ref_logprobs", "values", "returns")
        credit = {name: vectors[name] for name in names if name in vectors}
        if self.config.is_preference:
            # A distance to the reference on tokens that the policy did not draw is no KL.
            credit.pop("ref_logprobs", None)
        if self.objective.loss.has_batch_stats:
            # The loss statistics of each optimizer step.
            for k, rows in enumerate(minibatches):
                part = batch.select(rows)
                given = fields_of(PolicyLossInputs, part, self.objective.loss.takes)
                inputs = PolicyLossInputs(cu_seqlens=part.cu_seqlens, **given)
                with rules_of("algorithm.loss"):
                    stats = self.objective.loss.batch_stats(inputs)
                credit |= {f"batch_stats/{k}/{name}": value for name, value in stats.items()}
        return credit

    def advantages(self, batch: RolloutBatch) -> Advantages:
        """Run the estimator on the scores in `batch.vectors` and normalise its advantages.

        If the batch has both log-probs, their raw KL is stored as `batch.vectors["kl"]` and never
        modified afterwards. Raises RunFailed as `assign` does.
        """
        vectors = batch.vectors
        if "logprobs" in vectors and "ref_logprobs" in vectors:
            kind = self.config.algorithm.kl.reward_kind
            batch.set("kl", approx_kl(vectors["logprobs"], vectors["ref_logprobs"], kind))
        result = self._estimate(batch)
        if self.passes.critic and result.returns is None:
            raise RunFailed(
                f"algorithm.estimator: {self.estimator.name!r} needs values but returned no"
                " returns, the targets of the critic: return Advantages(advantages,"
                " returns)"
            )
        normalized = normalize_advantages(
            result.advantages, batch.cu_seqlens, vectors["group_ids"], self.normalization
        )
        return replace(result, advantages=normalized)

    def _estimate(self, batch: RolloutBatch) -> Advantages:
        given = fields_of(EstimatorInputs, batch, self.estimator.takes)
        with rules_of("algorithm.estimator"):
            return self.estimator(EstimatorInputs(cu_seqlens=batch.cu_seqlens, **given))

    def measure(self, batch: RolloutBatch) -> dict[str, Tensor]:
        """Measure scored answers of rows that are not trained on: vectors by the metric's name."""
        if self.config.is_sft:
            return {"loss": -batch.vectors["logprobs"]}
        found = self._estimate(batch).metrics
        return {name.replace("/", "_"): values for name, values in found.items()}

    def _weights(self, batch: RolloutBatch, minibatches: Sequence[Sequence[int]]) -> Tensor:
        """Return each token's loss weight within its optimizer step; 0 if the token is too old."""
        if self.config.is_preference:
            return torch.full((batch.num_trainable,), 1 / batch.num_trained_rollouts)
        loss = self.config.algorithm.loss
        per_rollout = per_rollout_loss(self.config)
        weights = torch.zeros(batch.num_trainable)
        for rows in minibatches:
            part = torch.as_tensor(rows, dtype=torch.int64)
            lengths = (batch.cu_seqlens[1:] - batch.cu_seqlens[:-1])[part]
            cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            rollouts = batch.vectors["rollout_ids"][part] if per_rollout else None
            weights[ragged_index(batch.cu_seqlens, part)] = loss_weights(
                loss.aggregation, cu, norm_length=loss.norm_length, rollout_ids=rollouts
            )
        limit = self.config.algorithm.correction.max_staleness
        if limit is None:
            return weights
        assert batch.version is not None
        assert batch.versions is not None
        stale = stale_tokens(batch.versions.values, batch.version, limit)
        return mask_weights(weights, batch.versions.spread(stale))


def fields_of(
    record: type[EstimatorInputs] | type[PolicyLossInputs],
    batch: RolloutBatch,
    takes: Collection[str] = (),
) -> dict[str, Any]:
    """Return the batch vectors that are fields of `record`.

    Versions are included only if `takes` names them: they take 8 bytes a token, and few algorithms
    read them.
    """
    names = [field.name for field in fields(record)]
    found = {name: batch.vectors[name] for name in names if name in batch.vectors}
    if batch.versions is not None and "versions" in takes:
        found["versions"] = batch.versions.each()
    return found
