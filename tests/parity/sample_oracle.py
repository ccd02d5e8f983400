"""The optimizer step of `oracle.policy_step` on recorded samples with their sampling masks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import oracle
import torch
from cases import ENTROPY_COEF, KL_COEF, TEMPERATURE, VOCAB, make_vectors
from torch import Tensor

from rlcore.data.sample import Sample


def kept(sample: Sample) -> Tensor:
    """bool [m, VOCAB]."""
    assert sample.sampling_mask is not None
    mask = torch.zeros(sample.num_trainable, VOCAB, dtype=torch.bool)
    for row, (start, end) in enumerate(
        pairwise([0, *sample.sampling_mask.counts.cumsum().tolist()])
    ):
        mask[
            row, sample.sampling_mask.tokens[start:end].tolist() if end > start else slice(None)
        ] = True
    return mask


def step_on_samples(
    model: Any,
    samples: Sequence[Sample],
    sequences: Collection[int],
    *,
    before: Callable[[Sample], None] = lambda _: None,
) -> dict[str, Any]:
    """Log-probs and entropy [M] of all samples, and the gradients of a step on `sequences`.

    Args:
        before: called with each sample before its forward pass.
    """
    v = {
        name: value.double()
        for name, value in make_vectors(sum(s.num_trainable for s in samples)).items()
    }
    logprobs = []
    entropies = []
    at = 0
    total = torch.zeros((), dtype=torch.float64)
    for i, sample in enumerate(samples):
        before(sample)
        trainable = torch.from_numpy(sample.loss_mask).nonzero()[:, 0]
        text = torch.from_numpy(sample.tokens).long()
        mask = kept(sample)
        logits = model(text[None]).logits[0, trainable - 1] / TEMPERATURE
        log_p = logits.masked_fill(~mask, -torch.inf).log_softmax(-1)
        own = log_p.gather(1, text[trainable, None])[:, 0]
        entropy = -(log_p.exp() * log_p.masked_fill(~mask, 0.0)).sum(-1)
        rows = slice(at, at + len(trainable))
        at = rows.stop
        logprobs.append(own.detach())
        entropies.append(entropy.detach())
        if i in sequences:
            ratio = (own - v["old_logprobs"][rows]).exp()
            advantage = v["advantages"][rows]
            gap = v["ref_logprobs"][rows] - own
            surrogate = torch.maximum(
                -advantage * ratio, -advantage * ratio.clamp(1 - 0.2, 1 + 0.3)
            )
            per_token = surrogate + KL_COEF * (gap.exp() - gap - 1) - ENTROPY_COEF * entropy
            total = total + (v["weights"][rows] * per_token).sum()
    total.backward()
    return {
        "logprobs": torch.cat(logprobs),
        "entropy": torch.cat(entropies),
        "gradients": oracle._gradients(model),
    }
