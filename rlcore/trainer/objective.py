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

READ_BY = {
    "ref_logprobs": "the loss has a KL term (algorithm.kl.loss_coef)",
    "entropy": "the loss has an entropy bonus (algorithm.entropy_coef)",
    "rollout_logprobs": "the loss is corrected for the engine's log-probs (algorithm.correction)",
}


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
        others = self._regularisers(inputs)
        metrics = {**out.metrics, **self._distances(inputs)}
        # `training.max_update_kl` compares this metric with its limit.
        if not self.is_sft and "approxkl" not in metrics:
            metrics["approxkl"] = approx_kl(inputs.logprobs.detach(), inputs.old_logprobs, "k2")
        if self.correction is not None:
            found = self.correction(
                inputs.old_logprobs, _present(inputs, "rollout_logprobs"), inputs.cu_seqlens
            )
            # The weight is 0 where the correction drops the token.
            policy = found.weights * policy
            others = None if others is None else found.keep * others
            metrics |= found.metrics
        if inputs.weights is not None:
            metrics["policy_loss"] = inputs.weights * policy.detach()
        return replace(
            out, per_token=policy if others is None else policy + others, metrics=metrics
        )

    def _regularisers(self, inputs: PolicyLossInputs) -> Tensor | None:
        """Return the sum of KL term and entropy bonus, [M]; None if neither is configured."""
        terms: list[Tensor] = []
        if self.kl_coef:
            old = inputs.old_logprobs if self.kl_unbiased else None
            kl = loss_kl(
                inputs.logprobs, _present(inputs, "ref_logprobs"), self.kl_kind, old_logprobs=old
            )
            terms.append(self.kl_coef * kl)
        if self.entropy_coef:
            terms.append(-self.entropy_coef * _present(inputs, "entropy"))
        return sum(terms[1:], terms[0]) if terms else None

    def _distances(self, inputs: PolicyLossInputs) -> dict[str, Tensor]:
        """Measure the distance of the current policy to the reference and the engine, if given."""
        logprobs = inputs.logprobs.detach()
        metrics = dict[str, Tensor]()
        if inputs.ref_logprobs is not None:
            metrics["rollout/kl"] = approx_kl(logprobs, inputs.ref_logprobs, self.logged_kl_kind)
            metrics["rollout/kl_clamped_share"] = kl_clamped(logprobs, inputs.ref_logprobs)
        if inputs.rollout_logprobs is not None:
            metrics |= mismatch_vectors(logprobs, inputs.rollout_logprobs)
        return metrics


def _present(inputs: PolicyLossInputs, name: str) -> Tensor:
    """Return a field that the objective reads. Raises ValueError that names its config key."""
    value: Tensor | None = getattr(inputs, name)
    if value is None:
        raise ValueError(f"{READ_BY[name]}, but the inputs have no {name}")
    return value


@contextmanager
def rules_of(key: str) -> Iterator[None]:
    """Turn a rule broken by a plugin into a one-line RunFailed that begins with its config key."""
    try:
        yield
    except AlgorithmError as error:
        raise RunFailed(f"{key}: {error}") from error
