"""What one optimizer step minimises: the policy loss, KL against the reference, and an entropy bonus, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from torch import Tensor

from rlcore.algorithms import PolicyLoss, PolicyLossInputs, approx_kl, build_policy_loss
from rlcore.config.algorithm import AlgorithmConfig


class Objective:
    """`loss(inputs) + kl_coef * KL(policy || reference) - entropy_coef * entropy`, per token and unreduced.

    Every term goes through the same token weights, so no split of the step can change its gradient.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        self.loss = build_policy_loss(config.loss.name, **config.loss.options)
        self.kl_kind: Literal["k1", "k2", "k3"] = config.kl.loss_kind
        self.kl_coef = config.kl.loss_coef
        self.entropy_coef = config.entropy_coef

    @property
    def entropy_has_gradient(self) -> bool:
        return self.entropy_coef != 0.0

    def batch_stats(self, inputs: PolicyLossInputs) -> Mapping[str, Tensor]:
        """What the loss needs from the whole optimizer step, before it is split; empty for most losses."""
        stats = getattr(self.loss, "batch_stats", None)
        return {} if stats is None else stats(inputs)

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        out = self.loss(inputs)
        per_token, metrics = out.per_token, dict(out.metrics)
        if self.kl_coef:
            if inputs.ref_logprobs is None:
                raise ValueError("the loss has a KL term (algorithm.kl.loss_coef) but got no ref_logprobs")
            kl = approx_kl(inputs.logprobs, inputs.ref_logprobs, self.kl_kind)
            per_token = per_token + self.kl_coef * kl
            metrics["kl_loss"] = kl.detach()
        if inputs.entropy is not None:
            metrics["entropy"] = inputs.entropy.detach()
            if self.entropy_coef:
                per_token = per_token - self.entropy_coef * inputs.entropy
        return replace(out, per_token=per_token, metrics=metrics)
