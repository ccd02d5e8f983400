"""The objective per token: the policy loss with its correction, a KL term, an entropy bonus."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from rlcore.algorithms import (
    AlgorithmError,
    Correction,
    KLKind,
    PolicyLoss,
    PolicyLossInputs,
    approx_kl,
    build_policy_loss,
    kl_clamped,
    loss_kl,
    mismatch_vectors,
)
from rlcore.config.sections.algorithm import AlgorithmConfig
from rlcore.errors import RunFailed


class Objective:
    """The minimised quantity, per token and unreduced:

        correction weight * loss(inputs) + kl_coef * KL(policy || reference)
            - entropy_coef * entropy

    It is 0 for a token that the correction drops. All terms use the same loss weights, which are
    fixed from the whole optimizer step, so the gradient depends neither on how the step is split
    nor on dropped tokens in a denominator.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.loss = build_policy_loss(config.loss.name, **config.loss.options)
        self.is_sft = config.loss.name == "sft"
        self.correction = (
            None
            if config.correction.name == "none"
            else Correction(config.correction.name, **config.correction.options)
        )
        self.kl_kind: KLKind = config.kl.loss_kind
        self.logged_kl_kind: KLKind = config.kl.reward_kind
        self.kl_coef = config.kl.loss_coef
        self.kl_unbiased = config.kl.loss_unbiased
        self.entropy_coef = config.entropy_coef

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        """Compute the objective.

        The metrics are those of loss and correction, and the distances of the policy to itself
        before the step, to the reference, and to the engine.

        Raises:
            RunFailed: the loss broke a rule: it modified its inputs or returned a wrong shape.
        """
        with rules_of("algorithm.loss"):
            out = self.loss(inputs)
        policy = out.per_token
        # The KL term and the entropy bonus.
        others: Tensor | float = 0.0
        if self.kl_coef:
            assert inputs.ref_logprobs is not None
            old = inputs.old_logprobs if self.kl_unbiased else None
            kl = loss_kl(inputs.logprobs, inputs.ref_logprobs, self.kl_kind, old_logprobs=old)
            others = others + self.kl_coef * kl
        if self.entropy_coef:
            assert inputs.entropy is not None
            others = others - self.entropy_coef * inputs.entropy
        metrics = {**out.metrics}
        logprobs = inputs.logprobs.detach()
        if inputs.ref_logprobs is not None:
            metrics["rollout/kl"] = approx_kl(logprobs, inputs.ref_logprobs, self.logged_kl_kind)
            metrics["rollout/kl_clamped_share"] = kl_clamped(logprobs, inputs.ref_logprobs)
        if inputs.rollout_logprobs is not None:
            metrics |= mismatch_vectors(logprobs, inputs.rollout_logprobs)
        # `training.max_update_kl` compares this metric with its limit.
        if not self.is_sft and "approxkl" not in metrics:
            metrics["approxkl"] = approx_kl(logprobs, inputs.old_logprobs, "k2")
        if self.correction is not None:
            assert inputs.rollout_logprobs is not None
            found = self.correction(inputs.old_logprobs, inputs.rollout_logprobs, inputs.cu_seqlens)
            # The weight is 0 where the correction drops the token.
            policy = found.weights * policy
            others = found.keep * others
            metrics |= found.metrics
        if inputs.weights is not None:
            metrics["policy_loss"] = inputs.weights * policy.detach()
        return replace(out, per_token=policy + others, metrics=metrics)


@contextmanager
def rules_of(key: str) -> Iterator[None]:
    """Turn a rule broken by a plugin into a one-line RunFailed that begins with its config key."""
    try:
        yield
    except AlgorithmError as error:
        raise RunFailed(f"{key}: {error}") from error
