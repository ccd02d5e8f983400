"""A policy gradient that trusts failures less than successes."""

import torch

from rlcore.algorithms import PolicyLoss, PolicyLossInputs


class Hopeful:
    """Policy gradient in which a negative advantage counts for less.

    l_t = -w A logprobs        w = 1 where A > 0, else failure_weight
    """

    formula = "-w A * logprobs, w = 1 where A > 0, else failure_weight"
    source = "an example"

    def __init__(self, *, failure_weight: float = 0.5) -> None:
        self.failure_weight = failure_weight

    def __call__(self, inputs: PolicyLossInputs) -> PolicyLoss:
        failed = inputs.advantages < 0
        advantages = torch.where(failed, self.failure_weight * inputs.advantages, inputs.advantages)
        metrics = {"failed": failed.to(advantages.dtype)}  # logged as policy/failed_avg
        return PolicyLoss(-advantages * inputs.logprobs, metrics)
