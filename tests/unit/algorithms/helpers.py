"""What the tests of this folder share."""

from __future__ import annotations

import torch
from torch import Tensor

from rlcore.algorithms import EstimatorInputs

LENGTHS = (5, 0, 1, 70, 0, 33, 2, 1, 64)  # empty, one-token, and longer than a block of the scan


def cu(lengths: tuple[int, ...] | list[int]) -> Tensor:
    """Borders of sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0)


def permuted(inputs: EstimatorInputs, order: list[int]) -> tuple[EstimatorInputs, Tensor]:
    """Reorder the sequences; also return where each token of the result was before."""
    borders = inputs.cu_seqlens.tolist()
    tokens = [t for b in order for t in range(borders[b], borders[b + 1])]
    index, sequences = torch.tensor(tokens, dtype=torch.int64), torch.tensor(order)
    lengths = [borders[b + 1] - borders[b] for b in order]
    fields = {}
    for name in inputs.__dataclass_fields__:
        value = getattr(inputs, name)
        if value is not None and name != "cu_seqlens":
            fields[name] = value[sequences] if name in ("rewards", "group_ids") else value[index]
    return EstimatorInputs(cu_seqlens=cu(lengths), **fields), index
