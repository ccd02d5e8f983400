"""The share of a batch that one rank would receive, with every sequence at its longest."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from backends.megatron.batch.local_batch import LocalBatch, LocalMinibatch
from backends.megatron.parallel.state import ParallelState
from rlcore.data.batch import RolloutBatch

# vectors that the losses of a policy and of a critic may read
_PER_TOKEN = (
    "advantages", "weights", "old_logprobs", "ref_logprobs", "rollout_logprobs", "returns",
    "values",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """The micro-batches of a rank: full packs of sequences of one length."""

    micro_batches: int
    pack_tokens: int  # over all context-parallel ranks
    length: int  # tokens of a sequence; the last of a pack is shorter where it must be
    trainable: int  # of those

    @property
    def lengths(self) -> list[int]:
        """The lengths of the sequences of one pack."""
        whole, rest = divmod(self.pack_tokens, self.length)
        return [self.length] * whole + ([rest] if rest > 1 else [])


class RankBatch(LocalBatch):
    """A `LocalBatch` that no other rank took part in making."""

    def __init__(
        self,
        work: Work,
        parallel: ParallelState,
        *,
        pad_multiple: int,
        routed: tuple[int, int] | None,
    ) -> None:
        """Make the batch.

        Args:
            routed: (layers with experts, experts of a token) of the engine's records, if there are.
        """
        lengths = work.lengths
        own = lengths * work.micro_batches
        mask = torch.cat([_trainable(n, work) for n in own])
        trainable = int(mask.sum())
        vectors = dict.fromkeys(_PER_TOKEN, torch.full((trainable,), 0.1))
        self.batch = RolloutBatch(
            tokens=torch.zeros(len(mask), dtype=torch.int32),
            cu_tokens=torch.tensor([0, *accumulate(own)]),
            loss_mask=mask,
            vectors=vectors | {"sequence_ids": torch.arange(len(own))},
            routed_experts=(
                None if routed is None else torch.zeros(len(mask), *routed, dtype=torch.int16)
            ),
        )
        self.vectors = dict(self.batch.vectors)
        self.stats = {}
        borders = range(0, len(own) + 1, len(lengths))
        self.minibatches = [LocalMinibatch(borders, len(mask) * parallel.dp_size)]
        self._parallel = parallel
        self._device = torch.device("meta")  # integers stay where they are
        self._pad_multiple = pad_multiple
        self._shard_map = None
        self._packs = {}


def _trainable(length: int, work: Work) -> torch.Tensor:
    """The last tokens of a sequence, as large a share as of a whole one: bool [length]."""
    count = min(max(1, length * work.trainable // work.length), length - 1)
    return torch.arange(length) >= length - count
