"""The recipe of both sides of `end_to_end.py`. It imports nothing, as TRL's environment reads it.

Every value on which the two differ by default is written out here, so that neither runs on a
default of its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """GRPO, strictly on-policy, one optimizer step a batch, fp32, no KL."""

    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    temperature: float = 1.0  # the full distribution: no top-k, no top-p
    max_new_tokens: int = 8
    learning_rate: float = 1e-4  # constant, no warm-up
    beta1: float = 0.9
    beta2: float = 0.999
    adam_eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0  # global norm
    clip_ratio: float = 0.2  # never reached: a batch gets one step, so every ratio is 1
    # (r - mean) / (std + eps), std with n-1; TRL has no setting for it
    advantage_eps: float = 1e-4
    eval_steps: tuple[int, ...] = (0, 10, 20, 40)

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


RECIPE = Recipe()

# TRL's name of each aggregation (`algorithm.loss.aggregation`), as long as a batch is one
# micro-batch on one process.
TRL_LOSS_TYPES = {
    "token-mean": "dapo",  # divided by the tokens of the batch; TRL's default and ours
    "seq-mean-token-mean": "grpo",  # mean over a sequence's tokens, then over sequences
    # divided by sequences x max_new_tokens (our norm_length)
    "seq-mean-token-sum-norm": "dr_grpo",
}
