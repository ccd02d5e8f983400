"""Supervised fine-tuning as a policy loss."""

from __future__ import annotations

from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs


@register_policy_loss("sft", formula="-logprobs", source="maximum likelihood")
class SFT:
    """Negative log-likelihood of each trainable token, `l_t = -logprobs_t`; advantages and old
    log-probs are unread.
    """

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        return PolicyLoss(-inputs.logprobs)
