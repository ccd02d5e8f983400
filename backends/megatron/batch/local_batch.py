"""The part of a step's batch that a rank holds.

Rank 0 sends each data-parallel rank's share to one rank of its replica, which broadcasts it there,
over gloo and without pickling; each rank makes packs of its share. One rank of each replica's last
stage sends its results to rank 0. With one process nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.batch.pack import MicroBatch, make_micro_batch, pack_size
from backends.megatron.batch.update_record import NAMES as UPDATE_VECTORS
from backends.megatron.batch.update_record import UpdateRecord
from backends.megatron.parallel.agreement import broadcast_json
from backends.megatron.parallel.state import ParallelState
from rlcore.data.batch import PER_SEQUENCE, BatchSamplingMasks, RolloutBatch, ragged_index
from rlcore.data.packing.plan import MinibatchPlan
from rlcore.data.packing.sharing import Sharing, share_nothing, share_prefixes

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

    borders: Sequence[int]  # [micro-batches + 1], counted in sequences
    # model tokens of the whole optimizer step, over data and context parallelism
    step_tokens: int


class LocalBatch:
    """This rank's share of the batch that rank 0 distributes.

    Its sequences stand in the order of the micro-batches, so that a micro-batch is a slice of every
    vector. Making it is collective; other ranks than 0 pass None.
    """

    def __init__(
        self,
        batch: RolloutBatch | None,
        plans: Sequence[MinibatchPlan] | None,
        parallel: ParallelState,
        device: torch.device,
        *,
        pad_multiple: int,
        share_prefixes: bool = False,
    ) -> None:
        self.stats: dict[str, Tensor] = {}
        self._parallel = parallel
        self._device = device
        self._pad_multiple = pad_multiple
        self._share_prefixes = share_prefixes
        self._shard_map: ShardMap | None = None  # on rank 0
        self._packs: dict[int, list[MicroBatch]] = {}
        self.updates = UpdateRecord()
        steps = None
        shares = None
        if batch is not None:
            assert plans is not None
            self._shard_map = ShardMap.of(batch, plans, parallel.dp_size)
            steps = [_steps(batch, plans, d) for d in range(parallel.dp_size)]
            shares = [_share(batch, order) for order in self._shard_map.orders]
        steps = broadcast_json(steps, 0, parallel.control_group)
        self.minibatches = [LocalMinibatch(*step) for step in steps[parallel.dp_rank]]
        share = _scatter(shares, parallel)
        sampling_mask = None
        if "mask_tokens" in share:
            sampling_mask = BatchSamplingMasks(share.pop("mask_tokens"), share.pop("mask_offsets"))
        self.batch = RolloutBatch(
            tokens=share.pop("tokens"),
            cu_tokens=share.pop("cu_tokens"),
            loss_mask=share.pop("loss_mask"),
            sampling_mask=sampling_mask,
            routed_experts=share.pop("routed_experts", None),
            vectors=share,  # all that is left
        )
        self.vectors = {name: value.to(device) for name, value in share.items()}

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
        for name, value in _scatter(shares, self._parallel).items():
            where = self.stats if name.startswith(BATCH_STATS) else self.vectors
            where[name] = value.to(self._device)

    def collect(self, own: Sequence[Tensor] | None, count: int) -> list[Tensor] | None:
        """Gather `count` vectors over the trainable tokens to rank 0: fp32 [M] of the whole batch.

        Collective. Ranks outside the last pipeline stage pass None; ranks but 0 get None.
        """
        stacked = None if own is None else torch.stack([x.detach().float().cpu() for x in own])
        all_rows = () if self._shard_map is None else self._shard_map.rows
        parts = _gather(stacked, [(count, len(rows)) for rows in all_rows], self._parallel)
        if self._shard_map is None or parts is None:
            return None
        whole = torch.empty(count, self._shard_map.num_trainable)
        for rows, part in zip(all_rows, parts):
            whole[:, rows] = part
        return list(whole)

    def collect_updates(self) -> dict[str, Tensor] | None:
        """Gather what the updates did to each token to rank 0, by name. Collective."""
        own = None
        if self._parallel.is_last_stage:
            packs = (self.micro_batches(k) for k in range(len(self.minibatches)))
            own = self.updates.vectors([sum(one.num_trainable for one in of) for of in packs])
        found = self.collect(own, len(UPDATE_VECTORS))
        return None if found is None else dict(zip(UPDATE_VECTORS, found))

    def micro_batches(self, minibatch: int) -> list[MicroBatch]:
        """The packs of one optimizer step; every pass and epoch uses the same."""
        if minibatch not in self._packs:
            borders = self.minibatches[minibatch].borders
            places = [self._sharing(a, b) for a, b in pairwise(borders)]
            sizes = [pack_size(one.size, self._pad_multiple) for one in places]
            # pipeline stages exchange activations of one shape
            if self._parallel.pp_size > 1:
                sizes = [max(sizes)] * len(sizes)
            self._packs[minibatch] = [
                make_micro_batch(self.batch, a, b, size, self._device, self._parallel.cp, sharing)
                for (a, b), size, sharing in zip(pairwise(borders), sizes, places)
            ]
        return self._packs[minibatch]

    def _sharing(self, first: int, last: int) -> Sharing:
        """Where the tokens of the sequences [first, last) stand in their pack."""
        lengths = self.batch.lengths[first:last]
        multiple = self._parallel.cp.chunks
        if not self._share_prefixes:
            return share_nothing(lengths, multiple=multiple)
        model = slice(int(self.batch.cu_tokens[first]), int(self.batch.cu_tokens[last]))
        routed = self.batch.routed_experts
        return share_prefixes(
            self.batch.tokens[model],
            lengths,
            multiple=multiple,
            alike=None if routed is None else routed[model],
        )

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


def _share(batch: RolloutBatch, order: Tensor) -> dict[str, Tensor]:
    """The tensors that are sent to the data-parallel rank that holds the sequences `order`."""
    part = batch.select(order)
    vectors = {name: _plain(value) for name, value in part.vectors.items() if name not in ON_RANK_0}
    mask = part.sampling_mask
    masks = {} if mask is None else {"mask_tokens": mask.tokens, "mask_offsets": mask.offsets}
    routed = {} if part.routed_experts is None else {"routed_experts": part.routed_experts}
    return {
        "tokens": part.tokens,
        "cu_tokens": part.cu_tokens,
        "loss_mask": part.loss_mask,
        **masks,
        **routed,
        **vectors,
    }


def _steps(
    batch: RolloutBatch, plans: Sequence[MinibatchPlan], d: int
) -> list[tuple[list[int], int]]:
    """The fields of each `LocalMinibatch` of data-parallel rank `d`."""
    lengths = batch.lengths
    steps: list[tuple[list[int], int]] = []
    first = 0
    for plan in plans:
        everyone = [i for rank in range(len(plan.microbatches)) for i in plan.sequences(rank)]
        borders = list(accumulate(map(len, plan.microbatches[d]), initial=first))
        steps.append((borders, int(lengths[everyone].sum())))
        first = borders[-1]
    return steps


def _scatter(
    shares: Sequence[Mapping[str, Tensor]] | None, parallel: ParallelState
) -> dict[str, Tensor]:
    """Send the CPU tensors `shares[d]` of rank 0 to every rank of replica d. Collective."""
    if parallel.world_size == 1:
        assert shares is not None
        return dict(shares[0])
    layouts = None
    if shares is not None:
        layouts = [
            [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in s.items()]
            for s in shares
        ]
    layouts = broadcast_json(layouts, 0, parallel.control_group)
    leader = parallel.replica_leaders[parallel.dp_rank]
    if shares is not None:
        own = {name: tensor.contiguous() for name, tensor in shares[0].items()}
        for share, other in list(zip(shares, parallel.replica_leaders))[1:]:
            for data in _raw(share):
                dist.send(data, other, group=parallel.control_group)
    else:
        own = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in layouts[parallel.dp_rank]
        }
        if parallel.rank == leader:
            for data in _raw(own):
                dist.recv(data, 0, group=parallel.control_group)
    if parallel.replica_group.size() > 1:
        for data in _raw(own):
            dist.broadcast(data, leader, group=parallel.replica_group)
    return own


def _raw(share: Mapping[str, Tensor]) -> list[Tensor]:
    """The bytes of each tensor that is not empty: uint8, a view where the tensor is contiguous."""
    return [t.contiguous().view(-1).view(torch.uint8) for t in share.values() if t.numel()]


def _gather(
    own: Tensor | None, sizes: Sequence[tuple[int, int]], parallel: ParallelState
) -> list[Tensor] | None:
    """Gather a tensor of each replica's last stage to rank 0, in their order. Collective.

    Args:
        own: this rank's results, fp32 [k, M_d]; used on the source rank of each replica only.
        sizes: (k, M_d) of each replica; used on rank 0 only.
    """
    source = parallel.score_sources[parallel.dp_rank]
    if parallel.rank == 0:
        gathered = []
        for rank, (k, m) in zip(parallel.score_sources, sizes):
            if rank == 0:
                assert own is not None
                gathered.append(own)
            else:
                gathered.append(torch.empty(k, m))
                dist.recv(gathered[-1], rank, group=parallel.control_group)
        return gathered
    if parallel.rank == source:
        assert own is not None
        dist.send(own.contiguous(), 0, group=parallel.control_group)
    return None
