"""Group-relative advantages without the standard deviation, for Dr. GRPO."""

from __future__ import annotations

from rlcore.algorithms.estimators.groups import GroupedReturns
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.types import Advantages, EstimatorInputs


@register_estimator(
    "dr_grpo",
    compares_group=True,
    formula="A = R - mean of the group",
    source="Liu et al., arXiv:2503.20783",
)
class DrGRPO:
    """The reward of a sequence less the mean of its group, on each of its tokens.

        A_t = R - mean of the group

    Dividing by the std, as GRPO does, weighs prompts that are nearly solved or nearly hopeless more
    than the others. The other half of the method, a constant in place of the length of a sequence,
    is the aggregation `seq-mean-token-sum-norm`. In a group of one the advantage is 0.

    Z. Liu et al., "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        return group.advantages(group.residuals)
