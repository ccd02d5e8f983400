"""The plain policy gradient."""

from __future__ import annotations

from rlcore.algorithms.kl import clamped_log_ratio
from rlcore.algorithms.losses.surrogate import ratio_metrics
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs


@register_policy_loss(
    "reinforce",
    formula="-A * logprobs",
    source="Williams, Machine Learning 8, 1992; for GRPO: GPG, arXiv:2504.02546",
)
class Reinforce:
    """Log-likelihood weighted by the advantage, with no ratio and no clip.

        l_t = -A * logprobs

    Correct for tokens of the policy being trained; `old_logprobs` go into the metrics only (`ratio`
    and `approxkl`, `[M]`), which measure the distance from that case. verl calls this loss `gpg`.

    R. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement
    learning", Machine Learning 8, 1992; X. Chu et al., "GPG", arXiv:2504.02546.
    """

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        log_ratio = clamped_log_ratio(inputs.logprobs.detach(), inputs.old_logprobs)
        return PolicyLoss(-inputs.advantages * inputs.logprobs, ratio_metrics(log_ratio))
