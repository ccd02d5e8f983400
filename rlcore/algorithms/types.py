"""The records that estimators and policy losses take and return.

Shapes: `[M]` trainable tokens of the whole batch, `[B]` sequences, `[B+1]` offsets, `[B, P]` the P
parts of each sequence's reward. All records are frozen and check themselves when built; the tensors
in them are to be read, not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from rlcore.algorithms.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

# What a batch holds of each sequence, [B] or [B, P]; the other vectors are [M].
PER_SEQUENCE = frozenset(
    {"rewards", "group_ids", "baseline_rewards", "rollout_ids", "sequence_ids", "reward_parts"}
)
PER_PART = frozenset({"reward_parts"})  # the matrices [B, P] among these
_INTEGER_FIELDS = frozenset({"group_ids", "rollout_ids", "turn_ids", "versions", "sequence_ids"})


@dataclass(frozen=True, kw_only=True)
class EstimatorInputs:
    """The inputs of an advantage estimator: M trainable tokens of B sequences, in order.

    Optional fields are None unless the estimator declared them.
    """

    cu_seqlens: Tensor  # int64 [B+1], from 0 to M, never falling; a sequence may be empty
    rewards: Tensor  # float [B], outcome reward of each sequence
    group_ids: Tensor  # int64 [B], equal for samples of one prompt; any integers, any order
    token_rewards: Tensor | None = None  # float [M], extra per-token (process) rewards
    logprobs: Tensor | None = None  # float [M], of the policy before the step
    ref_logprobs: Tensor | None = None  # float [M]
    rollout_logprobs: Tensor | None = None  # float [M], as the engine reported them
    kl: Tensor | None = None  # float [M], approximate KL(policy || reference), raw
    values: Tensor | None = None  # float [M], critic value of the state before each token
    # float [B], e.g. the reward of the greedy sample (ReMax)
    baseline_rewards: Tensor | None = None
    teacher_logprobs: Tensor | None = None  # float [M], on-policy distillation
    versions: Tensor | None = None  # int64 [M], policy version that made each token
    # int64 [B], equal for the segments of one rollout, which count once; None: each is a rollout
    rollout_ids: Tensor | None = None
    turn_ids: Tensor | None = None  # int64 [M], the turn of its rollout in which a token was made
    # float [B, P], unweighted score of each part of the reward; NaN: the part gave the sample none
    reward_parts: Tensor | None = None

    def __post_init__(self) -> None:
        _check_record(self)

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """M."""
        return int(self.cu_seqlens[-1])


@dataclass(frozen=True)
class Advantages:
    """The result of an estimator: one advantage per token, and targets for a critic, if any."""

    advantages: Tensor  # float [M]
    returns: Tensor | None = None  # float [M]
    # By the metric's name, vectors of any length but 0, whose means are logged.
    metrics: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("advantages", "returns"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, torch.Tensor):
                raise InputError(
                    f"Advantages.{name}: expected a tensor [M], got {type(value).__name__}"
                )


@dataclass(frozen=True, kw_only=True)
class PolicyLossInputs:
    """The inputs of a policy loss: whole sequences of a micro-batch or of the optimizer step.

    On an accelerator the contents of `cu_seqlens` are not checked: the host would wait for the
    device once a micro-batch.
    """

    cu_seqlens: Tensor  # int64 [B+1]
    logprobs: Tensor  # float [M], with grad
    old_logprobs: Tensor  # float [M], of the policy before the step
    advantages: Tensor  # float [M]
    entropy: Tensor | None = None  # float [M]
    ref_logprobs: Tensor | None = None  # float [M]
    rollout_logprobs: Tensor | None = None  # float [M]
    versions: Tensor | None = None  # int64 [M]
    # float [M], the loss weights of these tokens (see `loss_weights`)
    weights: Tensor | None = None
    # int64 [B], an identity of each sequence that any split keeps: to choose tokens by a hash
    sequence_ids: Tensor | None = None
    # what the loss's `batch_stats` computed from the whole optimizer step
    batch_stats: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        waits = isinstance(self.cu_seqlens, torch.Tensor) and self.cu_seqlens.device.type != "cpu"
        known = self.logprobs.numel() if waits and isinstance(self.logprobs, torch.Tensor) else None
        _check_record(self, num_tokens=known)

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.cu_seqlens.numel() - 1

    @property
    def num_tokens(self) -> int:
        """M, without asking the device."""
        return self.logprobs.numel()


@dataclass(frozen=True)
class PolicyLoss:
    """The result of a policy loss, never reduced: the framework weighs and sums `per_token`."""

    per_token: Tensor  # float [M], with grad
    metrics: Mapping[str, Tensor] = field(default_factory=dict)  # detached [M] or [B]

    def __post_init__(self) -> None:
        if not isinstance(self.per_token, torch.Tensor):
            raise InputError(
                f"PolicyLoss.per_token: expected a tensor [M], got {type(self.per_token).__name__}"
            )


def _check_record(record: Any, *, num_tokens: int | None = None) -> None:
    """Raise `InputError` unless every field has its shape, kind of dtype and device.

    M is `cu_seqlens[-1]`, unless `num_tokens` gives it without asking the device.
    """
    cu_seqlens = record.cu_seqlens
    where = type(record).__name__
    check_cu_seqlens(cu_seqlens, f"{where}.cu_seqlens", contents=num_tokens is None)
    num_tokens = int(cu_seqlens[-1]) if num_tokens is None else num_tokens
    num_sequences = cu_seqlens.numel() - 1
    vectors = [f for f in fields(record) if f.name not in ("cu_seqlens", "batch_stats")]
    # Vectors of tokens come first.
    for vector in sorted(vectors, key=lambda f: f.name in PER_SEQUENCE):
        name = vector.name
        value = getattr(record, name)
        if value is None and vector.default is None:
            continue
        at = f"{where}.{name}"
        size = num_sequences if name in PER_SEQUENCE else num_tokens
        symbol = symbol_of(name)
        if not isinstance(value, torch.Tensor):
            raise InputError(f"{at}: expected a tensor {symbol}, got {type(value).__name__}")
        if not has_shape(name, value, size):
            raise InputError(
                f"{at}: expected shape {symbol} = [{size}{', P' if name in PER_PART else ''}] as in"
                f" cu_seqlens, got {list(value.shape)}"
            )
        if name in _INTEGER_FIELDS and (
            value.is_floating_point() or value.is_complex() or value.dtype == torch.bool
        ):
            raise InputError(f"{at}: expected an integer dtype, got {value.dtype}")
        if name not in _INTEGER_FIELDS and not value.is_floating_point():
            raise InputError(f"{at}: expected a floating dtype, got {value.dtype}")
        if value.device != cu_seqlens.device:
            raise InputError(
                f"{at}: expected device {cu_seqlens.device} as cu_seqlens, got {value.device}"
            )


def symbol_of(name: str) -> str:
    """Return the shape of a field in letters."""
    if name in PER_PART:
        return "[B, P]"
    return "[B]" if name in PER_SEQUENCE else "[M]"


def has_shape(name: str, value: Tensor, size: int) -> bool:
    """Whether `value` is [size], or [size, P] if the field `name` is in PER_PART."""
    rank = 2 if name in PER_PART else 1
    return value.dim() == rank and value.shape[0] == size


def check_cu_seqlens(cu_seqlens: Tensor, at: str = "cu_seqlens", *, contents: bool = True) -> None:
    """Raise `InputError` unless `cu_seqlens` is an integer vector that starts at 0 and never falls.

    Without `contents` only what the host knows is checked: the device is not waited for.
    """
    if not isinstance(cu_seqlens, torch.Tensor):
        raise InputError(f"{at}: expected an integer tensor [B+1], got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise InputError(f"{at}: expected shape [B+1] with B >= 0, got {list(cu_seqlens.shape)}")
    if cu_seqlens.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{at}: expected dtype int64 (or int32), got {cu_seqlens.dtype}")
    if not contents:
        return
    offsets = cu_seqlens.cpu()
    if int(offsets[0]) != 0:
        raise InputError(f"{at}: expected to start at 0, got {int(offsets[0])}")
    falls = (offsets.diff() < 0).nonzero()
    if falls.numel():
        b = int(falls[0])
        raise InputError(
            f"{at}: expected never to fall, got {int(offsets[b])} -> {int(offsets[b + 1])} at"
            f" sequence {b}"
        )
