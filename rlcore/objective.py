"""What one optimizer step minimises: the policy loss, KL against the reference, and an entropy bonus, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from rlcore.algorithms import (
    AlgorithmError,
    KLKind,
    PolicyLoss,
    PolicyLossInputs,
    approx_kl,
    build_policy_loss,
    kl_clamped,
)
from rlcore.config.algorithm import AlgorithmConfig
from rlcore.errors import RunFailed


class Objective:
    """`loss(inputs) + kl_coef * KL(policy || reference) - entropy_coef * entropy`, per token and unreduced.

    Every term goes through the same token weights, so no split of the step can change its gradient.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.loss = build_policy_loss(config.loss.name, **config.loss.options)
        self.kl_kind: KLKind = config.kl.loss_kind
        self.logged_kl_kind: KLKind = config.kl.reward_kind
        self.kl_coef = config.kl.loss_coef
        self.entropy_coef = config.entropy_coef

    def batch_stats(self, inputs: PolicyLossInputs) -> Mapping[str, Tensor]:
        """What the loss needs from the whole optimizer step, before it is split; empty for most losses."""
        return self.loss.batch_stats(inputs) if self.loss.has_batch_stats else {}

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        """Raises RunFailed where the loss broke a rule: it wrote into its inputs, or returned a wrong shape."""
        with rules_of("algorithm.loss"):
            out = self.loss(inputs)
        per_token, metrics = out.per_token, dict(out.metrics)
        logprobs = inputs.logprobs.detach()
        if inputs.ref_logprobs is not None:
            metrics["rollout/kl"] = approx_kl(logprobs, inputs.ref_logprobs, self.logged_kl_kind)
            metrics["rollout/kl_clamped_share"] = kl_clamped(logprobs, inputs.ref_logprobs)
        if inputs.rollout_logprobs is not None:
            metrics["rollout/train_rollout_logprob_diff"] = (logprobs - inputs.rollout_logprobs).abs()
        if inputs.weights is not None:
            metrics["policy_loss"] = inputs.weights * out.per_token.detach()
        if self.kl_coef:
            if inputs.ref_logprobs is None:
                raise ValueError("the loss has a KL term (algorithm.kl.loss_coef) but got no ref_logprobs")
            per_token = per_token + self.kl_coef * approx_kl(inputs.logprobs, inputs.ref_logprobs, self.kl_kind)
        if self.entropy_coef:
            if inputs.entropy is None:
                raise ValueError("the loss has an entropy bonus (algorithm.entropy_coef) but got no entropy")
            per_token = per_token - self.entropy_coef * inputs.entropy
        return replace(out, per_token=per_token, metrics=metrics)


@contextmanager
def rules_of(key: str) -> Iterator[None]:
    """A plugin that breaks a rule while training ends the run in one plain line, which begins with its config key."""
    try:
        yield
    except AlgorithmError as error:
        raise RunFailed(f"{key}: {error}") from error
