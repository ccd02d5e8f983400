"""Soft Adaptive Policy Optimization: a smooth gate instead of the clip."""

from __future__ import annotations

import torch

from rlcore.algorithms.kl import clamped_log_ratio
from rlcore.algorithms.losses.surrogate import ratio_metrics
from rlcore.algorithms.registry import register_policy_loss
from rlcore.algorithms.types import PolicyLoss, PolicyLossInputs


@register_policy_loss(
    "sapo",
    formula="-A * (4 / tau) * sigmoid(tau * (r - 1)),  tau = tau_pos where A > 0, else tau_neg",
    source="Gao et al., arXiv:2511.20347",
)
class SAPO:
    """Surrogate whose slope fades as the ratio leaves 1, faster for negative advantages.

        r   = exp(logprobs - old_logprobs), the log-ratio clamped to +-20 before exp
        tau = tau_pos where A > 0, else tau_neg
        l_t = -A * (4 / tau) * sigmoid(tau * (r - 1))

    The factor 4 / tau gives slope 1 at r = 1, where the gradient is that of -A r. Its value there
    is -2 A / tau, so losses of different tau do not compare. The paper averages over each sequence:
    `aggregation: seq-mean-token-mean`. Metrics, `[M]`: `ratio` and `approxkl`; nothing is clipped.

    C. Gao et al., "Soft Adaptive Policy Optimization", arXiv:2511.20347.
    """

    def __init__(self, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> None:
        for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
            if not 0.0 < tau < float("inf"):
                raise ValueError(f"{name}: expected a number > 0, got {tau}")
        self.tau_pos = tau_pos
        self.tau_neg = tau_neg

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        log_ratio = clamped_log_ratio(inputs.logprobs, inputs.old_logprobs)
        tau = torch.full_like(log_ratio, self.tau_neg).masked_fill(
            inputs.advantages > 0, self.tau_pos
        )
        gate = (4.0 / tau) * torch.sigmoid(tau * torch.expm1(log_ratio))
        return PolicyLoss(-inputs.advantages * gate, ratio_metrics(log_ratio))
