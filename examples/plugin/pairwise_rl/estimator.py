"""Advantages from comparing the samples of a prompt in pairs."""

import torch

from rlcore.algorithms import Advantages, EstimatorInputs, expand_to_tokens, segment_lengths


class Pairwise:
    """The share of its peers that a sample beats, less the share that beats it, on each of its
    tokens.

        A = scale * mean over the others of its group of sign(R - R_other)

    Whatever grows with the reward gives the same advantages. In a group of one the advantage is 0.
    """

    formula = "A = scale * mean of sign(R - R_other) over the others of the group"
    source = "an example"

    def __init__(self, *, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, inputs: EstimatorInputs) -> Advantages:
        scores = torch.zeros_like(inputs.rewards)
        # the reward of an empty sequence means nothing
        member = segment_lengths(inputs.cu_seqlens) > 0
        for group in inputs.group_ids[member].unique():
            rows = member & (inputs.group_ids == group)
            rewards = inputs.rewards[rows]
            lead = torch.sign(rewards[:, None] - rewards[None, :]).sum(1)
            scores[rows] = self.scale * lead / max(len(rewards) - 1, 1)
        return Advantages(expand_to_tokens(scores, inputs.cu_seqlens))
