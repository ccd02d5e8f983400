"""REINFORCE with a leave-one-out baseline."""

from __future__ import annotations

from rlcore.algorithms.estimators.groups import GroupedReturns
from rlcore.algorithms.registry import register_estimator
from rlcore.algorithms.reward_shaping import ShapedEstimator, shaped_returns
from rlcore.algorithms.types import Advantages, EstimatorInputs


@register_estimator(
    "rloo",
    shaped_rewards=True,
    compares_group=True,
    formula="A = G - mean of the others' G;  G = R - kl_coef * sum of kl_t",
    source="Ahmadian et al., arXiv:2402.14740",
)
class RLOO(ShapedEstimator):
    """The return of a sequence less the mean of those of the *others* in its group, on each of its
    tokens.

        G   = reward of the sequence + sum over its tokens of
              (token_rewards_t - kl_coef * kl_t + distill_coef * (teacher_logprobs_t - logprobs_t))
        A_t = G - mean of the G of the others  =  n / (n - 1) * (G - mean of the group)

    The sequence is one action: its whole KL is part of its return, and of the baseline of the
    others. In a group of one there are no others, and the advantage is 0.

    A. Ahmadian et al., "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from
    Human Feedback in LLMs", arXiv:2402.14740.
    """

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        group = GroupedReturns(inputs, shaped_returns(inputs, self.kl_coef, self.distill_coef))
        return group.advantages(group.leave_one_out)
