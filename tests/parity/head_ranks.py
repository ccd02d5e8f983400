"""Ranks of test_head.py: the fused head on shards of the vocabulary; rank 0 writes the results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_main import joined, payload
from torch import Tensor

from backends.megatron.model.head import fused_logprobs
from rlcore.data.batch import BatchSamplingMasks

ROWS = 11
HIDDEN = 6
VOCAB = 31
TEMPERATURE = 0.7


def make(padded: int) -> dict[str, Any]:
    """float64 tensors, the same in every process; sets of 1 to 7 tokens, the first of one alone."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (ROWS,), generator=generator)
    tokens[0] = 3
    others = [torch.randint(VOCAB, (i % 7,), generator=generator) for i in range(ROWS)]
    sets = [torch.cat([token[None], other]).unique() for token, other in zip(tokens, others)]
    return {
        "hidden": torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64),
        "weight": 2 * torch.randn(padded, HIDDEN, generator=generator, dtype=torch.float64),
        "tokens": tokens,
        "upstream": torch.randn(2, ROWS, generator=generator, dtype=torch.float64),
        "keep": BatchSamplingMasks(
            torch.cat(sets), torch.tensor([0] + [len(one) for one in sets]).cumsum(0)
        ),
    }


def run(case: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Tensor]:
    given = make(case["padded"])
    hidden = given["hidden"].requires_grad_()
    weight = given["weight"].chunk(group.size())[group.rank()].clone().requires_grad_()
    logprobs, entropy = fused_logprobs(
        hidden, weight, given["tokens"], vocab_size=VOCAB, tp=group, temperature=TEMPERATURE,
        tile_elements=case["tile"],
        sampling_mask=given["keep"] if case["keep"] else None,
    )  # fmt: skip
    assert entropy is not None
    (given["upstream"] * torch.stack([logprobs, entropy])).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    dist.all_reduce(hidden.grad, group=group)
    shards = [torch.empty_like(weight) for _ in range(group.size())]
    dist.all_gather(shards, weight.grad, group=group)
    return {
        "logprobs": logprobs.detach(),
        "entropy": entropy.detach(),
        "hidden": hidden.grad,
        "weight": torch.cat(shards),
    }


def main() -> None:
    folder = Path(sys.argv[1])
    with joined(folder, alone=True):
        group = dist.group.WORLD
        assert group is not None
        results = [run(case, group) for case in payload(folder)]
        if group.rank() == 0:
            torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main()
