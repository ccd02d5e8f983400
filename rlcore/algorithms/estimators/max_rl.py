"""Maximum-likelihood reinforcement learning: rewards in units of a prompt's success rate."""

from __future__ import annotations

import torch

from rlcore.algorithms.estimators.groups import GroupedReturns
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.types import Advantages, EstimatorInputs


@register_estimator(
    "max_rl",
    compares_group=True,
    formula="A = (R - mean of the group) / mean of the group",
    source="Tajwar et al., arXiv:2602.02710",
)
class MaxRL:
    """The reward of a sequence less the mean of its group, in units of that mean, on each of its
    tokens.

        A_t = (R - mean of the group) / mean of the group          0 where the mean is not positive

    With rewards of 0 and 1 and n samples a prompt it follows the gradient of the log success rate,
    cut off at order n of its expansion in pass@k (order 1 is REINFORCE, no cut is maximum
    likelihood): a prompt counts for more the harder it is. The paper defines it for such rewards;
    any that are >= 0 make sense. A group whose mean is negative has no success rate: dividing by it
    would turn the gradient around, so it counts as one without a success. In a group of one the
    advantage is 0.

    F. Tajwar et al., "Maximum Likelihood Reinforcement Learning", arXiv:2602.02710.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs)
        means = group.means
        return group.advantages(torch.where(means <= 0, 0.0, group.residuals / means))
