"""The records of a training step: its rollouts, its batch as ragged tensors, its updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlcore.algorithms import Moments
from rlcore.algorithms.types import PER_PART, PER_SEQUENCE, has_shape
from rlcore.data.sample import Sample, SamplingMasks, VersionSpan
from rlcore.errors import RunFailed

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StepRollouts:
    """The samples of one step, with the facts that only their source knows."""

    samples: list[Sample]
    metrics: dict[str, float]  # rollout/*, time/generation: known only to the source
    epoch: float  # passes over the prompts so far
    snapshot: dict[str, Any]  # the source's state after this step, without its buffer; JSON-able
    engines: Mapping[int, str] = field(default_factory=dict)  # draw -> engine, if known
    # Version in `samples` -> updates behind its weights.
    policy_steps: Mapping[int, int] = field(default_factory=dict)
    # Samples of the same groups whose reward failed. They are recorded but not trained on.
    unscored: Sequence[Sample] = ()
    # In a replay: the recorded step, and the version of the weights that it trained.
    recorded_step: int | None = None
    recorded_version: int | None = None

    def in_policy_steps(self, versions: TokenVersions) -> TokenVersions:
        """Map each version, which counts publications, to the updates behind its weights."""
        try:
            steps = [self.policy_steps[version] for version in versions.values.tolist()]
        except KeyError as error:
            raise RunFailed(
                f"an engine reports tokens made by version {error} of the weights, which this run"
                " never published; does another trainer publish to the same engines?"
            ) from None
        return TokenVersions(torch.tensor(steps, dtype=torch.int64), versions.lengths)


def ragged_index(cu: Tensor, sequences: Tensor) -> Tensor:
    """Return the flat positions of chosen sequences in a ragged vector, in order, int64 [m].

    Args:
        cu: offsets of the vector, [B+1].
        sequences: the chosen sequences, [b].
    """
    starts = cu[sequences]
    lengths = cu[sequences + 1] - cu[sequences]
    ends = lengths.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    shift = torch.repeat_interleave(starts - (ends - lengths), lengths, output_size=total)
    return torch.arange(total) + shift


@dataclass(frozen=True)
class BatchSamplingMasks:
    """The set of tokens from which each of M tokens was drawn, as one flat vector of sets.

    An empty set stands for the whole vocabulary. Each token is in its own set.
    """

    tokens: Tensor  # int32 or int64 [K], on any device
    # int64 [M+1], on the CPU: set i is tokens[offsets[i] : offsets[i + 1]]
    offsets: Tensor

    @classmethod
    def of(cls, sets: SamplingMasks) -> BatchSamplingMasks:
        """Make tensors of the sets."""
        offsets = torch.zeros(len(sets.counts) + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(sets.counts), 0, out=offsets[1:])
        return cls(torch.from_numpy(sets.tokens), offsets)

    def select(self, rows: Tensor) -> BatchSamplingMasks:
        """Return the sets of the tokens `rows`, int64 [m], in that order."""
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(self.offsets.diff()[rows], 0, out=offsets[1:])
        return BatchSamplingMasks(self.tokens[ragged_index(self.offsets, rows)], offsets)

    def sets_of(self, tokens: slice) -> SamplingMasks:
        """Return the sets of consecutive tokens; the sets' token ids are a view."""
        offsets = self.offsets[tokens.start : tokens.stop + 1]
        sets = slice(int(offsets[0]), int(offsets[-1]))
        return SamplingMasks(_read_only(self.tokens)[sets], offsets.diff().numpy().astype(np.int32))

    def to(self, device: torch.device) -> BatchSamplingMasks:
        """Return the same sets with the tokens on `device`."""
        return BatchSamplingMasks(self.tokens.to(device), self.offsets)


@dataclass(frozen=True)
class TokenVersions:
    """Versions of M tokens as spans: a few numbers a sequence, instead of 8 bytes a token."""

    values: Tensor  # int64 [S], the version of each span, in token order
    lengths: Tensor  # int64 [S], tokens of each span, above 0

    @classmethod
    def of(cls, versions: Tensor) -> TokenVersions:
        """Find the spans in one version per token, integers [M]."""
        values, lengths = versions.unique_consecutive(return_counts=True)
        return cls(values, lengths)

    @classmethod
    def joined(cls, spans: Sequence[VersionSpan]) -> TokenVersions:
        """Concatenate the spans of sequences."""
        filled = [span for span in spans if span.end > span.start]
        return cls(
            torch.tensor([span.version for span in filled], dtype=torch.int64),
            torch.tensor([span.end - span.start for span in filled], dtype=torch.int64),
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens, M."""
        return int(self.lengths.sum())

    def each(self) -> Tensor:
        """Return the version of each token, int64 [M]."""
        return self.spread(self.values)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat a value per span, [S], for each token of the span, [M]."""
        return values.repeat_interleave(self.lengths)

    def cut(self, cu: Tensor) -> tuple[TokenVersions, Tensor]:
        """Cut the spans where sequences end.

        Args:
            cu: offsets of the B sequences, int64 [B+1], from 0 to M.

        Returns:
            The spans, none of which crosses two sequences, and the number of spans of each
            sequence, int64 [B].
        """
        before = self.lengths.cumsum(0)
        ends = torch.cat([before, cu[1:][cu.diff() > 0]]).unique()
        cut = TokenVersions(
            self.values[torch.searchsorted(before, ends)], ends.diff(prepend=ends.new_zeros(1))
        )
        return cut, torch.searchsorted(ends, cu, right=True).diff()


@dataclass
class RolloutBatch:
    """B sequences of T tokens, M of them trainable. Everything is on the CPU.

    `vectors` holds values for each trainable token ([M]: rollout_logprobs, advantages, ...) or for
    each sequence ([B]: the names in PER_SEQUENCE; [B, P]: reward_parts). The versions of tokens,
    int64 [M], may be passed there too, and are kept as spans.
    """

    tokens: Tensor  # int32 [T]
    cu_tokens: Tensor  # int64 [B+1]
    loss_mask: Tensor  # bool [T]
    vectors: dict[str, Tensor] = field(default_factory=dict)
    # Version of the policy that will be trained on the batch, counted as in `versions`.
    version: int | None = None
    # The sets of the M trainable tokens. None: all were drawn from the whole vocabulary.
    sampling_mask: BatchSamplingMasks | None = None
    # int16 [T, layers with experts, k], -1 where the engine recorded none
    routed_experts: Tensor | None = None
    # Versions of the policy that made the M trainable tokens. None: no engine made them.
    versions: TokenVersions | None = None
    # What the estimator measured.
    metrics: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # int64 [B+1], over trainable tokens.
        mask = self.loss_mask.numpy()
        counts = [np.count_nonzero(mask[part]) for part in _array_parts(self.cu_tokens)]
        self.cu_seqlens = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0)
        for name, value in [*self.vectors.items()]:
            self.set(name, value)
        if self.versions is not None and self.versions.num_tokens != self.num_trainable:
            raise ValueError(
                f"batch.versions cover {self.versions.num_tokens} tokens, expected"
                f" {self.num_trainable}"
            )
        masks = self.sampling_mask
        if masks is not None and len(masks.offsets) != self.num_trainable + 1:
            raise ValueError(
                f"batch.sampling_mask holds {len(masks.offsets) - 1} sets, expected one for each of"
                f" {self.num_trainable} tokens"
            )

    def set(self, name: str, value: Tensor) -> None:
        """Store a vector after checking its shape; versions are stored as spans."""
        expected = self.num_sequences if name in PER_SEQUENCE else self.num_trainable
        if not has_shape(name, value, expected):
            wanted = f"({expected}, parts)" if name in PER_PART else f"({expected},)"
            raise ValueError(f"batch.{name} has shape {tuple(value.shape)}, expected {wanted}")
        if name == "versions":
            self.versions = TokenVersions.of(value)
            self.vectors.pop(name, None)
        else:
            self.vectors[name] = value

    @property
    def names(self) -> frozenset[str]:
        """The names of all stored vectors, including the versions."""
        return frozenset(self.vectors) | ({"versions"} if self.versions is not None else set())

    @property
    def num_sequences(self) -> int:
        """The number of sequences, B."""
        return len(self.cu_tokens) - 1

    @property
    def num_trainable(self) -> int:
        """The number of trainable tokens, M."""
        return int(self.cu_seqlens[-1])

    @property
    def num_trainable_each(self) -> list[int]:
        """The number of trainable tokens of each sequence."""
        counts: list[int] = self.cu_seqlens.diff().tolist()
        return counts

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts; all segments of a rollout count once."""
        return len(set(self.vectors["rollout_ids"].tolist()))

    @property
    def num_trained_rollouts(self) -> int:
        """The number of rollouts that have a trainable token."""
        return len(set(self.vectors["rollout_ids"][self.cu_seqlens.diff() > 0].tolist()))

    @property
    def lengths(self) -> Tensor:
        """The number of tokens of each sequence, prompt included, int64 [B]."""
        return self.cu_tokens.diff()

    @classmethod
    def from_samples(
        cls, samples: Sequence[Sample], *, reward_parts: Sequence[str] = ()
    ) -> RolloutBatch:
        """Make one batch of `samples`, in order.

        There are `baseline_rewards` if every sample has one; `token_rewards`, sampling masks and
        `routed_experts` if any sample has them (the others have 0, the whole vocabulary, and no
        record). Raises ValueError for a sample whose reward is not a finite number.

        Args:
            reward_parts: the reward parts whose scores become the columns of the matrix
                `reward_parts`, NaN where a sample lacks one; without names there is no matrix.
        """
        for s in samples:
            if not math.isfinite(s.reward):
                raise ValueError(
                    f"sample {s.index} of draw {s.draw} has the reward {s.reward}, expected a"
                    " finite number: a sample whose reward failed is not trained on"
                )
        lengths = np.array([0] + [len(s.tokens) for s in samples], dtype=np.int64)
        optional: dict[str, Tensor] = {}
        if samples and all(s.baseline_reward is not None for s in samples):
            optional["baseline_rewards"] = torch.tensor(
                [s.baseline_reward for s in samples], dtype=torch.float32
            )
        if any(s.token_rewards is not None for s in samples):
            given = [
                np.zeros(s.num_trainable) if s.token_rewards is None else s.token_rewards
                for s in samples
            ]
            optional["token_rewards"] = flat(given, np.float32)
        if any(s.turn_spans for s in samples):
            optional["turn_ids"] = flat([s.turn_ids() for s in samples], np.int64)
        masks = None
        if any(s.sampling_mask is not None for s in samples):
            sets = [s.sampling_mask or SamplingMasks.whole(s.num_trainable) for s in samples]
            masks = BatchSamplingMasks.of(SamplingMasks.joined(sets))
        if reward_parts:
            rows = [[s.reward_parts.get(name, math.nan) for name in reward_parts] for s in samples]
            optional["reward_parts"] = torch.tensor(rows, dtype=torch.float32).reshape(
                len(samples), len(reward_parts)
            )
        return cls(
            tokens=flat([s.tokens for s in samples], np.int32),
            cu_tokens=torch.from_numpy(lengths.cumsum()),
            loss_mask=flat([s.loss_mask for s in samples], np.bool_),
            sampling_mask=masks,
            routed_experts=_routed_experts(samples),
            vectors={
                "rewards": torch.tensor([s.reward for s in samples], dtype=torch.float32),
                "group_ids": torch.tensor([s.group_id for s in samples], dtype=torch.int64),
                "rollout_ids": torch.tensor([s.rollout_id for s in samples], dtype=torch.int64),
                "sequence_ids": torch.tensor([s.sequence_id for s in samples], dtype=torch.int64),
                "rollout_logprobs": flat([s.rollout_logprobs for s in samples], np.float32),
                **optional,
            },
            versions=TokenVersions.joined([span for s in samples for span in s.versions]),
        )

    def lend_arrays(self, samples: Sequence[Sample]) -> None:
        """Turn the arrays of `samples`, from which the batch was made, into views of the batch.

        So each token is held once. The views are read-only, and a batch is never modified. Arrays
        that the batch does not copy are left as they are.
        """
        models = _array_parts(self.cu_tokens)
        trainables = _array_parts(self.cu_seqlens)
        for sample, model, trainable in zip(samples, models, trainables, strict=True):
            sample.tokens = _read_only(self.tokens)[model]
            sample.loss_mask = _read_only(self.loss_mask).view(np.uint8)[model]
            for name in ("rollout_logprobs", "token_rewards"):
                if name in self.vectors and getattr(sample, name) is not None:
                    setattr(sample, name, _read_only(self.vectors[name])[trainable])
            if self.routed_experts is not None and sample.routed_experts is not None:
                recorded = len(sample.routed_experts)
                sample.routed_experts = _read_only(self.routed_experts)[model][:recorded]
            if self.sampling_mask is not None and sample.sampling_mask is not None:
                sample.sampling_mask = self.sampling_mask.sets_of(trainable)

    def select(self, sequences: Tensor | Sequence[int]) -> RolloutBatch:
        """Return the batch of the chosen sequences (int64 [b]), in the order given."""
        rows = torch.as_tensor(sequences, dtype=torch.int64)
        model = self.lengths.tolist()
        trainable = self.num_trainable_each
        cu = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(self.lengths[rows], 0, out=cu[1:])
        picked = {
            name: value[rows] if name in PER_SEQUENCE else _picked(value, trainable, rows)
            for name, value in self.vectors.items()
        }
        masks = self.sampling_mask
        if masks is not None:
            masks = masks.select(ragged_index(self.cu_seqlens, rows))
        routed = self.routed_experts
        versions = self.versions
        if versions is not None:
            versions, spans = versions.cut(self.cu_seqlens)
            versions = TokenVersions(
                *(_picked(x, spans.tolist(), rows) for x in (versions.values, versions.lengths))
            )
        return RolloutBatch(
            _picked(self.tokens, model, rows),
            cu,
            _picked(self.loss_mask, model, rows),
            picked,
            self.version,
            masks,
            None if routed is None else _picked(routed, model, rows),
            versions,
        )


@dataclass(frozen=True)
class UpdateResult:
    """The report of one optimizer step; the same on every rank."""

    # loss/policy_avg, policy/approxkl_avg, train/grad_norm, lr, ... by public name
    metrics: dict[str, float]
    moments: Moments  # sums behind the token means among the metrics
    not_finite: bool = False  # a model took no step because its gradient is not finite
    without_signal: bool = False  # a model took no step because its gradient is exactly 0


def _picked(values: Tensor, lengths: list[int], rows: Tensor) -> Tensor:
    """Return the parts of a ragged vector that belong to the chosen sequences, concatenated."""
    parts = values.split(lengths)
    return torch.cat([parts[i] for i in rows.tolist()]) if len(rows) else values[:0]


def flat(arrays: list[Any], dtype: Any) -> Tensor:
    """Concatenate arrays into one tensor of type `dtype`, copying them once."""
    if not arrays:
        return torch.zeros(0)
    return torch.from_numpy(np.concatenate(arrays, dtype=dtype, casting="unsafe"))


def _array_parts(offsets: Tensor) -> list[slice]:
    return [slice(*ends) for ends in pairwise(offsets.tolist())]


def _read_only(values: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = values.numpy()
    array.flags.writeable = False
    return array


def _routed_experts(samples: Sequence[Sample]) -> Tensor | None:
    records = [r for s in samples if (r := s.routed_experts) is not None and len(r)]
    if not records:
        return None
    shape = records[0].shape[1:]
    whole = np.full((sum(len(s.tokens) for s in samples), *shape), -1, dtype=np.int16)
    start = 0
    for sample in samples:
        record = sample.routed_experts
        if record is not None and len(record):
            whole[start : start + len(record)] = record
        start += len(sample.tokens)
    return torch.from_numpy(whole)
