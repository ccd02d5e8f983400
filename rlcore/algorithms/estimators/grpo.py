"""Group-relative advantages, for GRPO."""

from __future__ import annotations

from rlcore.algorithms.estimators.groups import GroupedReturns
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.types import Advantages, EstimatorInputs


@register_estimator(
    "grpo",
    compares_group=True,
    formula="A = (R - mean of the group) / (std of the group + eps)",
    source="Shao et al., arXiv:2402.03300",
)
class GRPO:
    """The reward of a sequence against those of its group, in units of their spread, on each of its
    tokens.

        A_t = (R - mean of the group) / (std of the group + eps)      std with n - 1
        A_t =  R - mean of the group                                  where normalize_std is False

    With leave_one_out the baseline is the mean of the *others*: n / (n - 1) * (R - mean) replaces
    R - mean. Only the baseline leaves the sample out; the std is that of the whole group. The
    advantage is 0 in a group of one, and where all rewards are equal.

    Z. Shao et al., "DeepSeekMath", arXiv:2402.03300; the leave-one-out baseline: arXiv:2402.14740.
    """

    def __init__(
        self, *, normalize_std: bool = True, eps: float = 1e-6, leave_one_out: bool = False
    ) -> None:
        if not 0.0 < eps < float("inf"):
            raise ValueError(f"eps: expected a number > 0, got {eps}")
        self.normalize_std = normalize_std
        self.eps = eps
        self.leave_one_out = leave_one_out

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        scores = group.leave_one_out if self.leave_one_out else group.residuals
        return group.advantages(scores / (group.stds + self.eps) if self.normalize_std else scores)
