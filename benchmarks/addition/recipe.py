"""The recipes of both sides of `end_to_end.py`. It imports nothing, as TRL's environment reads it.

Every value on which the two differ by default is written out here, so that neither runs on a
default of its own.
"""

from __future__ import annotations

import re
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
    heldout: int = 500  # held-out problems that are scored
    # A chat model gets the problem through its template, and answers with its last number.
    chat: bool = False

    def is_right(self, text: str, label: str, *, ended: bool) -> bool:
        """Score a response, given without special tokens; `ended`: by its end token."""
        if not self.chat:
            return text.strip() == label.strip()
        numbers = re.findall(r"\d+", text)
        return ended and bool(numbers) and numbers[-1] == label

    @property
    def samples_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt


RECIPES = {
    "toy": Recipe(),
    "smollm2": Recipe(
        prompts_per_step=8,
        max_new_tokens=16,
        learning_rate=1e-5,
        eval_steps=(0, 10),
        heldout=100,
        chat=True,
    ),
}

# TRL's name of each aggregation (`algorithm.loss.aggregation`), as long as a batch is one
# micro-batch on one process.
TRL_LOSS_TYPES = {
    "token-mean": "dapo",  # divided by the tokens of the batch; TRL's default and ours
    "seq-mean-token-mean": "grpo",  # mean over a sequence's tokens, then over sequences
    # divided by sequences x max_new_tokens (our norm_length)
    "seq-mean-token-sum-norm": "dr_grpo",
}
