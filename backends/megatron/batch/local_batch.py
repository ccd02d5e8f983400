"""The part of a step's batch that a rank holds.

Rank 0 distributes the batch over the replicas; each rank makes packs of its share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from backends.megatron.batch.pack import MicroBatch, make_micro_batch, pack_size
from backends.megatron.batch.transfer import gather_rows, scatter_shares
from backends.megatron.parallel.state import ParallelState
from rlcore.data.batch import PER_SEQUENCE, BatchSamplingMasks, RolloutBatch, ragged_index
from rlcore.data.packing import MinibatchPlan, padded_length

ON_RANK_0 = PER_SEQUENCE - {"sequence_ids"}  # vectors that estimators read and losses do not
# a vector whose name begins so belongs to no token: all of it goes to every rank
BATCH_STATS = "batch_stats/"


@dataclass(frozen=True)
class ShardMap:
    """The sequences that each data-parallel rank holds, in its order; known to rank 0."""

    num_trainable: int
    orders: tuple[Tensor, ...]  # [dp_size] int64: sequences
    # [dp_size] int64: indices of their tokens in a compact vector of the whole batch
    rows: tuple[Tensor, ...]

    @classmethod
    def of(cls, batch: RolloutBatch, plans: Sequence[MinibatchPlan], dp_size: int) -> ShardMap:
        """Read the map from the plans; ValueError unless they place every sequence once."""
        orders = tuple(
            torch.tensor([i for plan in plans for i in plan.sequences(d)], dtype=torch.int64)
            for d in range(dp_size)
        )
        placed = torch.bincount(torch.cat(orders), minlength=batch.num_sequences)
        if placed.numel() != batch.num_sequences or bool((placed != 1).any()):
            wrong = int((placed != 1).nonzero()[0])
            raise ValueError(
                f"the plans place sequence {wrong} of {batch.num_sequences} {int(placed[wrong])}"
                " times, expected once"
            )
        return cls(
            batch.num_trainable,
            orders,
            tuple(ragged_index(batch.cu_seqlens, order) for order in orders),
        )


@dataclass(frozen=True)
class LocalMinibatch:
    """One optimizer step's part of the local batch."""

    borders: tuple[int, ...]  # [micro-batches + 1], counted in sequences
    # model tokens of the whole optimizer step, over data and context parallelism
    step_tokens: int


class LocalBatch:
    """This rank's share of a batch.

    Its sequences stand in the order of the micro-batches, so that a micro-batch is a slice of every
    vector.
    """

    def __init__(
        self,
        batch: RolloutBatch,
        minibatches: Sequence[LocalMinibatch],
        parallel: ParallelState,
        device: torch.device,
        *,
        pad_multiple: int,
        shard_map: ShardMap | None,
    ) -> None:
        self.batch = batch
        self.minibatches = tuple(minibatches)
        self.vectors = {name: value.to(device) for name, value in batch.vectors.items()}
        self.stats: dict[str, Tensor] = {}
        self._parallel = parallel
        self._device = device
        self._pad_multiple = pad_multiple
        self._shard_map = shard_map  # on rank 0
        self._packs: dict[int, list[MicroBatch]] = {}

    @classmethod
    def receive(
        cls,
        batch: RolloutBatch | None,
        plans: Sequence[MinibatchPlan] | None,
        parallel: ParallelState,
        device: torch.device,
        *,
        pad_multiple: int,
    ) -> LocalBatch:
        """Distribute the batch of rank 0, and return this rank's share.

        Collective; other ranks pass None.
        """
        shard_map = None
        shares = None
        if batch is not None:
            assert plans is not None
            shard_map = ShardMap.of(batch, plans, parallel.dp_size)
            shares = [_share(batch, plans, d, order) for d, order in enumerate(shard_map.orders)]
        share = scatter_shares(shares, parallel)
        minibatches = _decode(share.pop("plan"))
        sampling_mask = None
        if "mask_tokens" in share:
            sampling_mask = BatchSamplingMasks(share.pop("mask_tokens"), share.pop("mask_offsets"))
        own = RolloutBatch(
            tokens=share.pop("tokens"),
            cu_tokens=share.pop("cu_tokens"),
            loss_mask=share.pop("loss_mask"),
            sampling_mask=sampling_mask,
            routed_experts=share.pop("routed_experts", None),
            vectors=share,  # all that is left
        )
        return cls(
            own, minibatches, parallel, device, pad_multiple=pad_multiple, shard_map=shard_map
        )

    def assign(self, vectors: Mapping[str, Tensor] | None) -> None:
        """Take per-token vectors [M] of the whole batch from rank 0. Collective.

        Raises ValueError on rank 0 for a vector of another length.
        """
        shares = None
        if vectors is not None:
            if self._shard_map is None:
                raise ValueError("only rank 0 hands vectors over; the other ranks pass None")
            num_trainable = self._shard_map.num_trainable
            for name, value in vectors.items():
                if not name.startswith(BATCH_STATS) and value.shape != (num_trainable,):
                    raise ValueError(
                        f"{name}: shape {tuple(value.shape)}, expected one value for each of the "
                        f"{num_trainable} trainable tokens"
                    )
            shares = [
                {k: v if k.startswith(BATCH_STATS) else _plain(v)[rows] for k, v in vectors.items()}
                for rows in self._shard_map.rows
            ]
        for name, value in scatter_shares(shares, self._parallel).items():
            where = self.stats if name.startswith(BATCH_STATS) else self.vectors
            where[name] = value.to(self._device)

    def collect(self, own: Sequence[Tensor] | None, count: int) -> list[Tensor] | None:
        """Gather `count` vectors over the trainable tokens to rank 0: fp32 [M] of the whole batch.

        Collective. Ranks outside the last pipeline stage pass None; ranks but 0 get None.
        """
        stacked = None if own is None else torch.stack([x.detach().float().cpu() for x in own])
        all_rows = () if self._shard_map is None else self._shard_map.rows
        parts = gather_rows(stacked, [(count, len(rows)) for rows in all_rows], self._parallel)
        if self._shard_map is None or parts is None:
            return None
        whole = torch.empty(count, self._shard_map.num_trainable)
        for rows, part in zip(all_rows, parts):
            whole[:, rows] = part
        return list(whole)

    def micro_batches(self, minibatch: int) -> list[MicroBatch]:
        """The packs of one optimizer step; every pass and epoch uses the same."""
        if minibatch not in self._packs:
            borders = self.minibatches[minibatch].borders
            cp = self._parallel.cp
            padded = [padded_length(n, cp.chunks) for n in self.batch.lengths.tolist()]
            sizes = [pack_size(sum(padded[a:b]), self._pad_multiple) for a, b in pairwise(borders)]
            # pipeline stages exchange activations of one shape
            if self._parallel.pp_size > 1:
                sizes = [max(sizes)] * len(sizes)
            self._packs[minibatch] = [
                make_micro_batch(self.batch, a, b, size, self._device, cp)
                for a, b, size in zip(borders, borders[1:], sizes)
            ]
        return self._packs[minibatch]

    def vector(self, name: str) -> Tensor:
        """The vector over this rank's trainable tokens, [m]. Raises ValueError if unassigned."""
        if name not in self.vectors:
            raise ValueError(
                f"{name!r} was not assigned before the update; assigned are {sorted(self.vectors)}"
            )
        return self.vectors[name]

    def batch_stats(self, minibatch: int) -> dict[str, Tensor] | None:
        """The loss's statistics of a whole optimizer step, by name; None where it has none.

        `assign` received them as `batch_stats/<minibatch>/<name>`.
        """
        prefix = f"{BATCH_STATS}{minibatch}/"
        found = {
            name.removeprefix(prefix): value
            for name, value in self.stats.items()
            if name.startswith(prefix)
        }
        return found or None


def _plain(vector: Tensor) -> Tensor:
    """The vector on the CPU, in fp32 if it is floating."""
    return vector.detach().to("cpu", torch.float32 if vector.is_floating_point() else vector.dtype)


def _share(
    batch: RolloutBatch, plans: Sequence[MinibatchPlan], d: int, order: Tensor
) -> dict[str, Tensor]:
    """The tensors that are sent to data-parallel rank `d`."""
    part = batch.select(order)
    vectors = {name: _plain(value) for name, value in part.vectors.items() if name not in ON_RANK_0}
    mask = part.sampling_mask
    masks = {} if mask is None else {"mask_tokens": mask.tokens, "mask_offsets": mask.offsets}
    routed = {} if part.routed_experts is None else {"routed_experts": part.routed_experts}
    return {
        "tokens": part.tokens,
        "cu_tokens": part.cu_tokens,
        "loss_mask": part.loss_mask,
        "plan": _encode(batch, plans, d),
        **masks,
        **routed,
        **vectors,
    }


def _encode(batch: RolloutBatch, plans: Sequence[MinibatchPlan], d: int) -> Tensor:
    """The plans of data-parallel rank `d` as int64.

    For each optimizer step: its model tokens, its number of micro-batches, and the number of
    sequences in each.
    """
    lengths = batch.lengths
    numbers: list[int] = []
    for plan in plans:
        everyone = [i for rank in range(len(plan.microbatches)) for i in plan.sequences(rank)]
        micro = plan.microbatches[d]
        numbers += [int(lengths[everyone].sum()), len(micro), *map(len, micro)]
    return torch.tensor(numbers, dtype=torch.int64)


def _decode(plan: Tensor) -> list[LocalMinibatch]:
    numbers = plan.tolist()
    minibatches: list[LocalMinibatch] = []
    at = first = 0
    while at < len(numbers):
        step_tokens, micro = numbers[at : at + 2]
        borders = [first]
        for count in numbers[at + 2 : at + 2 + micro]:
            borders.append(borders[-1] + count)
        minibatches.append(LocalMinibatch(tuple(borders), step_tokens))
        at = at + 2 + micro
        first = borders[-1]
    return minibatches
