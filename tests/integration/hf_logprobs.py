"""Log-probs by transformers, in float64, of samples that a run has recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlcore.data.sample import Sample


@torch.no_grad()
def logprobs(folder: Path, samples: Sequence[Sample], temperature: float = 1.0) -> list[Tensor]:
    """Compute the log-probs of each sample's trainable tokens [m], with the weights in `folder`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    out = []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()
        logits = model(tokens[None]).logits[0, :-1] / temperature
        of_tokens = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        out.append(of_tokens[torch.from_numpy(sample.loss_mask[1:]).bool()])
    return out
