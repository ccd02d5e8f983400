"""Group policy gradient: a mean baseline, rescaled for the groups that teach nothing."""

from __future__ import annotations

from rlcore.algorithms.estimators.groups import GroupedReturns
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.types import Advantages, EstimatorInputs


@register_estimator(
    "gpg",
    compares_group=True,
    formula=(
        "A = alpha * (R - mean of the group);  alpha = samples / samples of groups whose rewards"
        " differ"
    ),
    source="Chu et al., arXiv:2504.02546",
)
class GPG:
    """The reward of a sequence less the mean of its group, scaled up for the samples without a
    gradient.

        alpha = samples / samples in groups whose rewards differ      over the whole batch
        A_t   = alpha * (R - mean of the group)                       F_norm = 1 of the paper

    A group that is all right or all wrong adds nothing to the gradient but counts in its mean;
    alpha (the paper's B / (B - M)) takes it out again. So advantages depend on the whole batch.
    verl counts *rewards* that are not 0 instead of groups with a gradient, which on 0/1 rewards
    also scales by how hard the prompts are. Groups of one have no gradient: their advantage is 0.
    Where no group has a gradient, alpha is 1. Rollout filters take the place of the paper's
    resampling of thin batches.

    X. Chu et al., "GPG: A Simple and Strong Reinforcement Learning Baseline for Model Reasoning",
    arXiv:2504.02546.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        with_gradient = (group.total(group.residuals.abs()) > 0).double()
        alpha = with_gradient.numel() / with_gradient.sum().clamp(min=1)
        return group.advantages(alpha * group.residuals)
