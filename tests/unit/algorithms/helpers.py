"""What the tests of this folder share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlcore.algorithms import EstimatorInputs

LENGTHS = (5, 0, 1, 70, 0, 33, 2, 1, 64)  # empty, one-token, and longer than a block of the scan


PER_SEQUENCE = ("rewards", "group_ids", "baseline_rewards", "rollout_ids", "reward_parts")


def cu(lengths: tuple[int, ...] | list[int]) -> Tensor:
    """Borders of sequences of these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0)


def random_inputs(
    lengths: tuple[int, ...] | list[int] = LENGTHS, seed: int = 0, **changes: Tensor | None
) -> EstimatorInputs:
    """Build a random float64 batch with every optional field; keyword arguments replace fields."""
    generator = torch.Generator().manual_seed(seed)

    def noise(n: int) -> Tensor:
        return torch.randn(n, generator=generator, dtype=torch.float64)

    cu_seqlens = cu(lengths)
    size = sum(lengths)
    # shuffled, negative ones too
    groups = torch.randint(-2, 2, (len(lengths),), generator=generator)
    fields = {
        "rewards": noise(len(lengths)), "group_ids": groups, "values": noise(size), "kl": noise(
        size).abs(),
        "token_rewards": noise(size) / 10, "logprobs": -noise(size).abs(), "teacher_logprobs": -
        noise(size).abs(),
        "baseline_rewards": noise(len(lengths)),
        "reward_parts": noise(3 * len(lengths)).reshape(-1, 3),
        "ref_logprobs": -noise(size).abs(),
    }  # fmt: skip
    return EstimatorInputs(cu_seqlens=cu_seqlens, **{**fields, **changes})


def permuted(inputs: EstimatorInputs, order: list[int]) -> tuple[EstimatorInputs, Tensor]:
    """Reorder the sequences; also return where each token of the result was before."""
    borders = inputs.cu_seqlens.tolist()
    tokens = [t for b in order for t in range(borders[b], borders[b + 1])]
    index = torch.tensor(tokens, dtype=torch.int64)
    sequences = torch.tensor(order, dtype=torch.int64)
    lengths = [borders[b + 1] - borders[b] for b in order]
    fields = {}
    for name in inputs.__dataclass_fields__:
        value = getattr(inputs, name)
        if value is not None and name != "cu_seqlens":
            fields[name] = value[sequences] if name in PER_SEQUENCE else value[index]
    return EstimatorInputs(cu_seqlens=cu(lengths), **fields), index


def in_float32(inputs: EstimatorInputs) -> EstimatorInputs:
    """Round every floating field to float32."""
    fields = {name: getattr(inputs, name) for name in inputs.__dataclass_fields__}
    return EstimatorInputs(**{
        name: value.float() if value is not None and value.is_floating_point() else value for name,
        value in fields.items()
    })  # fmt: skip


def plugin_id(value: Any) -> str:
    """Names a test by its plugin and the rule that it breaks."""
    return value if isinstance(value, str) else str(value.__name__)
