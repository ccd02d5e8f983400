"""REINFORCE with the length-weighted optimal baseline, for OPO."""

from __future__ import annotations

from rlcore.algorithms.estimators.groups import GroupedReturns
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.types import Advantages, EstimatorInputs


@register_estimator(
    "opo",
    compares_group=True,
    formula="A = R - sum(length * R) / sum(length), sums over the group",
    source="Hao et al., arXiv:2505.23585",
)
class OPO:
    """The reward of a sequence less the mean of its group weighted by length, on each of its
    tokens.

        b   = sum of l_i * R_i / sum of l_i          over the group; l_i counts trainable tokens
        A_t = R - b

    b minimises the variance of the gradient where the squared norm of a sequence's score grows with
    its length. In a group of one the advantage is 0. The paper trains strictly on-policy: one
    optimizer step a batch.

    Y. Hao et al., "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        lengths = group.lengths.double()
        # R - b from residuals, which are exactly 0 where the rewards are equal, and so is the
        # difference
        offset = group.total(lengths * group.residuals) / group.total(lengths)
        return group.advantages(group.residuals - offset)
