"""Defines the context that a workflow is built with, and makes its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlcore.data.generation import Completion, SamplingParams
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class WorkflowContext:
    """Tells a workflow, at its construction, how to sample and which random numbers to use.

    A run constructs several workflows: for training, for evaluation, and for the greedy baseline of
    an estimator that needs it. Only `seed` tells their requests apart.
    """

    sampling: SamplingParams
    samples_per_prompt: int
    seed: int
    tokenizer: PreTrainedTokenizerBase


def make_sample(prompt: Prompt, draw: int, index: int, completion: Completion) -> Sample:
    """A sample of one prompt and one completion; text and reward are filled in later."""
    size = len(prompt.tokens)
    made = len(completion.tokens)
    mask = np.zeros(size + made, dtype=np.uint8)
    mask[size:] = 1
    return Sample(
        draw=draw,
        index=index,
        prompt_id=prompt.prompt_id,
        group_id=draw,
        # unique in a run, whatever the number of samples a draw
        rollout_id=(draw << 20) + index,
        tokens=np.concatenate([prompt.tokens, completion.tokens]),
        loss_mask=mask,
        rollout_logprobs=completion.logprobs,
        versions=completion.versions,
        sampling_mask=completion.sampling_mask,
        routed_experts=completion.routed_experts,
        finish_reason=completion.finish_reason,
        prompt_text=prompt.text,
        label=prompt.label,
        metadata=dict(prompt.row),
    )
