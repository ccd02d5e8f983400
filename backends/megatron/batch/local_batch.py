"""The batch of one step as the ranks hold it: rank 0 lays it out, each replica keeps its share and
cuts it into packs.
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

ON_RANK_0 = PER_SEQUENCE - {"sequence_ids"}  # what estimators read and losses do not
# a vector of this name belongs to no token: it goes whole to every rank
BATCH_STATS = "batch_stats/"


@dataclass(frozen=True)
class ShardMap:
    """Rank 0's book: which sequences each data-parallel rank holds, in which order."""

    num_trainable: int
    orders: tuple[Tensor, ...]  # [dp_size] int64: sequences
    # [dp_size] int64: their places in a compact vector of the whole batch
    rows: tuple[Tensor, ...]

    @classmethod
    def of(cls, batch: RolloutBatch, plans: Sequence[MinibatchPlan], dp_size: int) -> ShardMap:
        """Raises ValueError unless the plans place every sequence exactly once."""
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
    """One optimizer step's part of the share: the borders of its micro-batches, counted in
    sequences.
    """

    borders: tuple[int, ...]  # [micro-batches + 1]
    # model tokens of the whole optimizer step, over data and context parallelism
    step_tokens: int


class LocalBatch:
    """This rank's share: sequences in the order of its micro-batches, so that each is a slice of
    every vector.
    """

    def __init__(
        self, batch: RolloutBatch, minibatches: Sequence[LocalMinibatch], parallel: ParallelState, device: torch.device,
        *, pad_multiple: int, distribution: ShardMap | None,
    ) -> None:  # fmt: skip
        self.batch = batch
        self.minibatches = tuple(minibatches)
        self.vectors = {name: value.to(device) for name, value in batch.vectors.items()}
        self.stats: dict[str, Tensor] = {}
        self._parallel = parallel
        self._device = device
        self._pad_multiple = pad_multiple
        self._distribution = distribution  # on rank 0
        self._packs: dict[int, list[MicroBatch]] = {}

    @classmethod
    def receive(
        cls, batch: RolloutBatch | None, plans: Sequence[MinibatchPlan] | None, parallel: ParallelState,
        device: torch.device, *, pad_multiple: int,
    ) -> LocalBatch:  # fmt: skip
        """Lay `batch` out (rank 0 has it, the others pass None) and keep this rank's share.
        Collective.
        """
        distribution = None
        shares = None
        if batch is not None:
            assert plans is not None
            distribution = ShardMap.of(batch, plans, parallel.dp_size)
            shares = [_share(batch, plans, d, order) for d, order in enumerate(distribution.orders)]
        share = scatter_shares(shares, parallel)
        minibatches = _decode(share.pop("plan"))
        sampling_mask = (
            BatchSamplingMasks(share.pop("kept_tokens"), share.pop("kept_offsets"))
            if "kept_tokens" in share
            else None
        )
        routed = share.pop("routed_experts", None)
        held = RolloutBatch(
            share.pop("tokens"),
            share.pop("cu_tokens"),
            share.pop("loss_mask"),
            share,
            None,
            sampling_mask,
            routed,
        )
        return cls(
            held,
            minibatches,
            parallel,
            device,
            pad_multiple=pad_multiple,
            distribution=distribution,
        )

    def assign(self, vectors: Mapping[str, Tensor] | None) -> None:
        """Take per-token vectors [M] of the whole batch from rank 0. Collective.

        Raises ValueError on rank 0 for a vector of another length.
        """
        shares = None
        if vectors is not None:
            book = self._book
            for name, value in vectors.items():
                if not name.startswith(BATCH_STATS) and value.shape != (book.num_trainable,):
                    raise ValueError(f"{name}: shape {tuple(value.shape)}, expected one value for each of the "
                                     f"{book.num_trainable} trainable tokens")  # fmt: skip
            shares = [
                {k: v if k.startswith(BATCH_STATS) else _plain(v)[rows] for k, v in vectors.items()}
                for rows in book.rows
            ]
        for name, value in scatter_shares(shares, self._parallel).items():
            where = self.stats if name.startswith(BATCH_STATS) else self.vectors
            where[name] = value.to(self._device)

    def collect(self, own: Sequence[Tensor] | None, count: int) -> list[Tensor] | None:
        """`count` vectors over this rank's trainable tokens, as fp32 [M] of the whole batch on rank
        0. Collective.

        Ranks outside the last pipeline stage pass None.
        """
        stacked = None if own is None else torch.stack([x.detach().float().cpu() for x in own])
        if self._distribution is None:
            gather_rows(stacked, [], self._parallel)
            return None
        parts = gather_rows(
            stacked, [(count, len(rows)) for rows in self._distribution.rows], self._parallel
        )
        assert parts is not None
        whole = torch.empty(count, self._distribution.num_trainable)
        for rows, part in zip(self._distribution.rows, parts):
            whole[:, rows] = part
        return list(whole)

    def micro_batches(self, minibatch: int) -> list[MicroBatch]:
        """The packs of one optimizer step, made when first asked for and kept: every pass and epoch
        uses the same.
        """
        if minibatch not in self._packs:
            borders = self.minibatches[minibatch].borders
            place = self._parallel.place
            padded = [padded_length(n, place.chunks) for n in self.batch.lengths.tolist()]
            sizes = [pack_size(sum(padded[a:b]), self._pad_multiple) for a, b in pairwise(borders)]
            # stages exchange activations of one shape in a schedule call
            if self._parallel.pp_size > 1:
                sizes = [max(sizes)] * len(sizes)
            self._packs[minibatch] = [
                make_micro_batch(self.batch, a, b, size, self._device, place)
                for a, b, size in zip(borders, borders[1:], sizes)
            ]
        return self._packs[minibatch]

    def vector(self, name: str) -> Tensor:
        """[m] over this rank's trainable tokens. Raises ValueError where it was never assigned."""
        if name not in self.vectors:
            raise ValueError(
                f"{name!r} was not assigned before the update; assigned are {sorted(self.vectors)}"
            )
        return self.vectors[name]

    def batch_stats(self, minibatch: int) -> dict[str, Tensor] | None:
        """Named `batch_stats/<minibatch>/<name>` in `assign`: what the loss computed from the whole
        optimizer step.
        """
        prefix = f"{BATCH_STATS}{minibatch}/"
        found = {
            name.removeprefix(prefix): value
            for name, value in self.stats.items()
            if name.startswith(prefix)
        }
        return found or None

    @property
    def _book(self) -> ShardMap:
        if self._distribution is None:
            raise ValueError("only rank 0 hands vectors over; the other ranks pass None")
        return self._distribution


def _plain(vector: Tensor) -> Tensor:
    """On the CPU, floating vectors in fp32."""
    return vector.detach().to("cpu", torch.float32 if vector.is_floating_point() else vector.dtype)


def _share(
    batch: RolloutBatch, plans: Sequence[MinibatchPlan], d: int, order: Tensor
) -> dict[str, Tensor]:
    """The tensors that data-parallel rank `d` gets."""
    part = batch.select(order)
    vectors = {name: _plain(value) for name, value in part.vectors.items() if name not in ON_RANK_0}
    sets = part.sampling_mask
    kept = {} if sets is None else {"kept_tokens": sets.tokens, "kept_offsets": sets.offsets}
    routed = {} if part.routed_experts is None else {"routed_experts": part.routed_experts}
    return {
        "tokens": part.tokens,
        "cu_tokens": part.cu_tokens,
        "loss_mask": part.loss_mask,
        "plan": _encode(batch, plans, d),
        **kept,
        **routed,
        **vectors,
    }


def _encode(batch: RolloutBatch, plans: Sequence[MinibatchPlan], d: int) -> Tensor:
    """int64: for each optimizer step its model tokens, its number of micro-batches, and the
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
