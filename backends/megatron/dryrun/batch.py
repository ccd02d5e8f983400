"""The share of a batch that one rank would receive, with every sequence at its longest."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from backends.megatron.batch.local_batch import LocalBatch, LocalMinibatch
from backends.megatron.batch.update_record import UpdateRecord
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
    siblings: int = 1  # sequences that share all tokens but those

    @property
    def sequences(self) -> list[tuple[list[int], int]]:
        """The tokens of each sequence of one pack, all different ones, and how many are trainable.

        What the last whole ones leave belongs to a shorter one, as large a share of it trainable.
        """
        found: list[tuple[list[int], int]] = []
        own = self._trainable(self.length)
        start = 0
        while (left := self.pack_tokens - start) > 1:
            prompt = self.length - own if left >= self.length else left - self._trainable(left)
            shared = list(range(start, start + prompt))
            start += prompt
            for _ in range(self.siblings):
                count = min(own, self.pack_tokens - start)
                if count:
                    found.append(([*shared, *range(start, start + count)], count))
                start += count
        return found

    def _trainable(self, length: int) -> int:
        return min(max(1, length * self.trainable // self.length), length - 1)


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
        sequences = work.sequences * work.micro_batches
        own = [len(tokens) for tokens, _ in sequences]
        mask = torch.cat([torch.arange(n) >= n - count for n, (_, count) in zip(own, sequences)])
        trainable = int(mask.sum())
        vectors = dict.fromkeys(_PER_TOKEN, torch.full((trainable,), 0.1))
        self.batch = RolloutBatch(
            tokens=torch.tensor([t for tokens, _ in sequences for t in tokens], dtype=torch.int32),
            cu_tokens=torch.tensor([0, *accumulate(own)]),
            loss_mask=mask,
            vectors=vectors | {"sequence_ids": torch.arange(len(own))},
            routed_experts=(
                None if routed is None else torch.zeros(len(mask), *routed, dtype=torch.int16)
            ),
        )
        self.vectors = dict(self.batch.vectors)
        self.stats = {}
        borders = range(0, len(own) + 1, len(own) // work.micro_batches)
        self.minibatches = [LocalMinibatch(borders, len(mask) * parallel.dp_size)]
        self._parallel = parallel
        self._device = torch.device("meta")  # integers stay where they are
        self._pad_multiple = pad_multiple
        self._share_prefixes = work.siblings > 1
        self._shard_map = None
        self._packs = {}
        self.updates = UpdateRecord()
