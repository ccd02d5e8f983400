"""Small batches for the contract tests, from one token upwards, and ways to rearrange them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlcore.algorithms.types import PER_SEQUENCE, EstimatorInputs, PolicyLossInputs

Record = TypeVar("Record", EstimatorInputs, PolicyLossInputs)


@dataclass(frozen=True)
class Layout:
    """The number of tokens and the group of each sequence."""

    lengths: tuple[int, ...]
    groups: tuple[int, ...]


# Two groups of eight neighbours: the one layout that even an estimator that reshapes rewards to
# [-1, n] can take.
NEIGHBOURS = Layout((1, 2, 3, 1, 2, 1, 1, 2) * 2, (0,) * 8 + (1,) * 8)
PARTS = 3  # number of columns of reward_parts
WITHOUT_TOKENS = (Layout((), ()), Layout((0,), (0,)), Layout((0, 0, 0), (4, -1, 4)))


def peers(seed: int) -> list[Layout]:
    """Layouts, smallest first, with two members or more in every group and no empty sequence."""
    small = [Layout((1, 1, 1, 1), (0, 1, 0, 1)), Layout((2, 1, 1, 3, 1), (7, -3, 7, -3, 7))]
    alternating = Layout(NEIGHBOURS.lengths, (0, 1) * 8)
    return [*small, _random(seed, [0] * 2 + [3] * 3 + [-9] * 6, longest=70), alternating]


def loners(seed: int) -> list[Layout]:
    """Layouts, smallest first, in which some or all groups have one member."""
    small = [Layout((1,), (0,)), Layout((1, 1), (0, 1)), Layout((2, 1, 1), (6, -2, 6))]
    return [*small, _random(seed, [0, 1, 2, 2, 2, -5, 8, 8], longest=40)]


def _random(seed: int, groups: Sequence[int], longest: int) -> Layout:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(groups), generator=generator).tolist()
    lengths = torch.randint(1, longest + 1, (len(groups),), generator=generator).tolist()
    return Layout(tuple(lengths), tuple(groups[i] for i in order))


def borders(lengths: Collection[int]) -> Tensor:
    """Return `cu_seqlens` of sequences of these lengths."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def full_batch(record: type[Record], layout: Layout, seed: int) -> Record:
    """Return a float64 batch with every field but `batch_stats`.

    Sequences without tokens have the reward NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(layout.lengths)
    num_sequences = len(layout.lengths)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape or (num_tokens,), generator=generator, dtype=torch.float64)

    counted = torch.tensor(layout.lengths, dtype=torch.int64) > 0
    unread = torch.where(counted, 0.0, float("nan")).double()
    logprobs = -normal().exp()
    ref_logprobs = -normal().exp()
    numbers: dict[str, Any] = {
        "cu_seqlens": borders(layout.lengths),
        "rewards": normal(num_sequences) + unread,
        "group_ids": torch.tensor(layout.groups, dtype=torch.int64),
        "token_rewards": normal() / 10,
        "logprobs": logprobs,
        "ref_logprobs": ref_logprobs,
        "rollout_logprobs": logprobs + 0.1 * normal(),
        "kl": logprobs - ref_logprobs,
        "values": normal(),
        "baseline_rewards": normal(num_sequences) + unread,
        "teacher_logprobs": -normal().exp(),
        "versions": torch.randint(3, 6, (num_tokens,), generator=generator),
        "rollout_ids": 5 - 3 * torch.arange(num_sequences),
        "turn_ids": torch.randint(0, 3, (num_tokens,), generator=generator),
        "reward_parts": normal(num_sequences, PARTS) + unread[:, None],
        "old_logprobs": logprobs + 0.3 * normal(),
        "advantages": normal(),
        "entropy": normal().abs(),
        "weights": normal().abs() / max(num_tokens, 1),
        "sequence_ids": 7 * torch.arange(num_sequences) + 3,
    }
    return record(**{f.name: numbers[f.name] for f in fields(record) if f.name in numbers})


def tensors(record: Record) -> Iterator[tuple[str, Tensor]]:
    """Yield the fields that hold a tensor."""
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            yield field.name, value


def only(record: Record, names: Collection[str]) -> Record:
    """Keep these fields and drop the others."""
    dropped: dict[str, Any] = {name: None for name, _ in tensors(record) if name not in names}
    return replace(record, **dropped)


def floating(record: Record, change: Callable[[Tensor], Tensor]) -> Record:
    """Change every field of floats."""
    changed: dict[str, Any] = {
        name: change(value) for name, value in tensors(record) if value.is_floating_point()
    }
    return replace(record, **changed)


def converted(record: Record, dtype: torch.dtype) -> Record:
    """Return the record with its floats in another precision."""
    return floating(record, lambda value: value.to(dtype))


def take(record: Record, order: Sequence[int]) -> tuple[Record, Tensor]:
    """Choose and order sequences; also return the index that does so to a vector of tokens."""
    starts = record.cu_seqlens.tolist()
    lengths = record.cu_seqlens.diff().tolist()
    tokens = torch.tensor(
        [starts[b] + t for b in order for t in range(lengths[b])], dtype=torch.int64
    )
    sequences = torch.tensor(order, dtype=torch.int64)
    changed: dict[str, Any] = {
        name: value[sequences if name in PER_SEQUENCE else tokens]
        for name, value in tensors(record)
        if name != "cu_seqlens"
    }
    return replace(record, cu_seqlens=borders([lengths[b] for b in order]), **changed), tokens


def cut(record: EstimatorInputs) -> EstimatorInputs:
    """Cut every sequence of two tokens or more into two segments of one rollout."""
    pieces: list[int] = []
    owners: list[int] = []
    for b, length in enumerate(record.cu_seqlens.diff().tolist()):
        head = length // 3 + 1 if length > 1 else length
        segments = [head, length - head] if length > head else [length]
        pieces += segments
        owners += [b] * len(segments)
    rows = torch.tensor(owners, dtype=torch.int64)
    changed: dict[str, Any] = {
        name: value[rows] for name, value in tensors(record) if name in PER_SEQUENCE
    }
    return replace(record, cu_seqlens=borders(pieces), **changed)


def shuffled(count: int, seed: int) -> list[list[int]]:
    """Return orders of `count` items: reversed, rotated by one, and random."""
    order = list(range(count))
    return [
        order[::-1],
        order[1:] + order[:1],
        torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist(),
    ]


def describe(record: Record, names: Collection[str]) -> str:
    """Write a batch out, one line a field, at most eight numbers of each.

    Ids of rollouts are left out where each sequence is one.
    """
    lines = [f"lengths {_numbers(record.cu_seqlens.diff())}"]
    ids = getattr(record, "rollout_ids", None)
    if ids is not None and len(ids.unique()) == len(ids):
        names = {*names} - {"rollout_ids"}
    lines += [
        f"{name} {_numbers(value)}"
        for name, value in tensors(record)
        if name in names and name != "cu_seqlens"
    ]
    return "\n".join(lines)


def _numbers(vector: Tensor) -> str:
    # A matrix [B, P] is shown by its columns, the parts of the reward.
    if vector.dim() == 2:
        return "; ".join(_numbers(column) for column in vector.T)
    shown = ", ".join(
        f"{x:.6g}" if vector.is_floating_point() else str(x) for x in vector[:8].tolist()
    )
    return f"[{shown}{', ...' if vector.numel() > 8 else ''}]"
