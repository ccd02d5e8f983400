"""The part of a step's batch that a rank holds.

Rank 0 sends each replica's share to one rank of the replica, which broadcasts it to the others,
over gloo and without pickling; each rank makes packs of its share. One rank of each replica's last
stage sends the results to rank 0. A single process sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.batch.pack import MicroBatch, make_micro_batch, pack_size
from backends.megatron.batch.update_record import NAMES as UPDATE_VECTORS
from backends.megatron.batch.update_record import UpdateRecord
from backends.megatron.parallel.agreement import broadcast_json
from backends.megatron.parallel.state import ParallelState
from rlcore.config import Config
from rlcore.config.derived import micro_batch_tokens
from rlcore.data.batch import PER_SEQUENCE, BatchSamplingMasks, RolloutBatch, TokenVersions
from rlcore.data.packing.plan import MinibatchPlan, PlanRules
from rlcore.data.packing.sharing import Sharing, share_nothing, share_prefixes
from rlcore.planning.shape import CostModel

ON_RANK_0 = PER_SEQUENCE - {"sequence_ids"}  # vectors that estimators read and losses do not
# Prefix of vectors that belong to no token: every rank receives all of such a vector.
BATCH_STATS = "batch_stats/"
Share = dict[str, Sequence[Tensor]]  # tensors by name, each as consecutive parts


def plan_rules(
    config: Config, parallel: ParallelState, cost: CostModel, *, share_prefixes: bool
) -> PlanRules:
    """The rules for micro-batches that follow from layout and token budget."""
    layout = config.policy.parallel
    return PlanRules(
        ranks=parallel.dp_size,
        max_tokens=micro_batch_tokens(config),
        cost=cost,
        multiple=layout.pipeline if layout.virtual_pipeline > 1 else 1,
        pad=parallel.cp.chunks,
        share_prefixes=share_prefixes,
    )


@dataclass(frozen=True)
class Parts(Sequence[Tensor]):
    """Parts of a vector, as views that are made on access: each view takes 1 KB."""

    vector: Tensor
    slices: tuple[slice, ...]

    def __getitem__(self, index: Any) -> Any:
        return self.vector[self.slices[index]]

    def __len__(self) -> int:
        return len(self.slices)


@dataclass(frozen=True)
class ShardMap:
    """The sequences that each data-parallel rank holds, in its order. Only rank 0 has the map."""

    lengths: tuple[int, ...]  # trainable tokens of each sequence
    orders: tuple[tuple[int, ...], ...]  # [dp_size]: sequences

    @classmethod
    def of(cls, batch: RolloutBatch, plans: Sequence[MinibatchPlan], dp_size: int) -> ShardMap:
        """Read the map from the plans. Raises ValueError unless they hold every sequence once."""
        orders = tuple(
            tuple(i for plan in plans for i in plan.sequences(d)) for d in range(dp_size)
        )
        everything = torch.tensor([*chain(*orders)], dtype=torch.int64)
        placed = torch.bincount(everything, minlength=batch.num_sequences)
        if placed.numel() != batch.num_sequences or bool((placed != 1).any()):
            wrong = int((placed != 1).nonzero()[0])
            raise ValueError(
                f"the plans hold sequence {wrong} of {batch.num_sequences} {int(placed[wrong])}"
                " times, expected once"
            )
        return cls(tuple(batch.num_trainable_each), orders)

    @property
    def counts(self) -> list[int]:
        """The number of trainable tokens of each rank."""
        return [sum(self.lengths[i] for i in order) for order in self.orders]

    def split(self, vector: Tensor, lengths: Sequence[int] | None = None) -> list[Parts]:
        """Return each rank's parts of a vector over the sequences' tokens, as views.

        Args:
            lengths: elements of each sequence in the vector; default: its trainable tokens.
        """
        slices = _slices(self.lengths if lengths is None else lengths)
        empty = (slice(0, 0),)
        return [Parts(vector, tuple(slices[i] for i in o) or empty) for o in self.orders]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the ranks' parts into the vector over all trainable tokens."""
        slices = _slices(self.lengths)
        whole = torch.empty(sum(self.lengths), dtype=parts[0].dtype)
        for order, own in zip(self.orders, parts):
            for i, part in zip(order, own.split([self.lengths[i] for i in order])):
                whole[slices[i]] = part
        return whole


def _slices(lengths: Sequence[int]) -> list[slice]:
    """The slices of consecutive parts of these lengths."""
    return [slice(*pair) for pair in pairwise(accumulate(lengths, initial=0))]


@dataclass(frozen=True)
class LocalMinibatch:
    """One optimizer step's part of the local batch."""

    offsets: Sequence[int]  # [micro-batches + 1], counted in sequences
    # model tokens of the whole optimizer step, over data and context parallelism
    step_tokens: int


class LocalBatch:
    """This rank's share of the batch that rank 0 distributes.

    Its sequences are in the order of the micro-batches, so that a micro-batch is a slice of every
    vector. The constructor is collective; ranks other than 0 pass None.
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
        mtp_coef: float = 0.0,
    ) -> None:
        self.stats: dict[str, Tensor] = {}
        self._parallel = parallel
        self._device = device
        self._pad_multiple = pad_multiple
        self._share_prefixes = share_prefixes
        self.mtp_coef = mtp_coef
        # None on ranks other than 0.
        self._shard_map: ShardMap | None = None
        self._packs: dict[int, list[MicroBatch]] = {}
        self.updates = UpdateRecord()
        steps = shares = None
        if batch is not None:
            assert plans is not None
            self._shard_map = ShardMap.of(batch, plans, parallel.dp_size)
            steps = [_steps(batch, plans, d) for d in range(parallel.dp_size)]
            shares = _shares(batch, self._shard_map)
        steps = broadcast_json(steps, 0, parallel.control_group)
        self.minibatches = [LocalMinibatch(*step) for step in steps[parallel.dp_rank]]
        share = _scatter(shares, parallel)
        sampling_mask = None
        if "mask_tokens" in share:
            sampling_mask = BatchSamplingMasks(share.pop("mask_tokens"), share.pop("mask_offsets"))
        versions = None
        if "version_values" in share:
            versions = TokenVersions(share.pop("version_values"), share.pop("version_lengths"))
        self.batch = RolloutBatch(
            tokens=share.pop("tokens"),
            cu_tokens=share.pop("cu_tokens"),
            loss_mask=share.pop("loss_mask"),
            sampling_mask=sampling_mask,
            routed_experts=share.pop("routed_experts", None),
            versions=versions,
            # The remaining entries are vectors.
            vectors=share,
        )
        self.vectors = {name: value.to(device) for name, value in share.items()}
        if self.batch.versions is not None:
            self.vectors["versions"] = self.batch.versions.each().to(device)

    def assign(self, vectors: Mapping[str, Tensor] | None) -> None:
        """Take per-token vectors [M] of the whole batch from rank 0. Collective.

        Raises ValueError on rank 0 for a vector of another length.
        """
        shares: list[Share] | None = None
        if vectors is not None:
            assert self._shard_map is not None, "ranks other than 0 pass None"
            num_trainable = sum(self._shard_map.lengths)
            shares = [{} for _ in self._shard_map.orders]
            for name, value in vectors.items():
                if name.startswith(BATCH_STATS):
                    by_rank: Sequence[Sequence[Tensor]] = [[value]] * len(shares)
                elif value.shape != (num_trainable,):
                    raise ValueError(
                        f"{name}: shape {tuple(value.shape)}, expected one value for each of the "
                        f"{num_trainable} trainable tokens"
                    )
                else:
                    by_rank = self._shard_map.split(_plain(value))
                for share, parts in zip(shares, by_rank):
                    share[name] = parts
        for name, value in _scatter(shares, self._parallel).items():
            where = self.stats if name.startswith(BATCH_STATS) else self.vectors
            where[name] = value.to(self._device)

    def collect(self, own: Sequence[Tensor] | None, count: int) -> list[Tensor] | None:
        """Gather `count` vectors over the trainable tokens to rank 0: fp32 [M] of the whole batch.

        Collective. Ranks outside the last pipeline stage pass None; ranks other than 0 get None.
        """
        stacked = None if own is None else torch.stack([x.detach().float().cpu() for x in own])
        counts = [] if self._shard_map is None else self._shard_map.counts
        parts = _gather(stacked, [(count, m) for m in counts], self._parallel)
        if self._shard_map is None or parts is None:
            return None
        return [self._shard_map.join([part[k] for part in parts]) for k in range(count)]

    def collect_updates(self) -> dict[str, Tensor] | None:
        """Gather the vectors of the update record to rank 0, by name. Collective."""
        own = None
        if self._parallel.is_last_stage:
            packs = (self.micro_batches(k) for k in range(len(self.minibatches)))
            own = self.updates.vectors([sum(one.num_trainable for one in of) for of in packs])
        found = self.collect(own, len(UPDATE_VECTORS))
        return None if found is None else dict(zip(UPDATE_VECTORS, found))

    def micro_batches(self, minibatch: int) -> list[MicroBatch]:
        """The packs of one optimizer step; every pass and epoch uses the same."""
        if minibatch not in self._packs:
            offsets = self.minibatches[minibatch].offsets
            self._packs[minibatch] = self._pack([*pairwise(offsets)])
        return self._packs[minibatch]

    def excerpts(self, micro_batches: Sequence[MicroBatch], tokens: int) -> list[MicroBatch]:
        """Pack a few consecutive sequences of each micro-batch again.

        They hold at least `tokens` trainable tokens, or all of the micro-batch. The contents of the
        batch choose where they begin, alike on all ranks of a replica.
        """
        at = int(self.batch.tokens.sum(dtype=torch.int64))
        ranges = []
        for micro in micro_batches:
            first = micro.sequences.start
            last = micro.sequences.stop
            rows = self.batch.cu_seqlens[first : last + 1]
            # The last sequence at which enough tokens follow.
            most = int((rows[-1] - rows >= tokens).sum()) - 1
            begin = at % (last - first) if last > first else 0
            begin = max(0, min(begin, most))
            count = int((rows - rows[begin] < tokens).sum())
            ranges.append((first + begin, min(first + count, last)))
        return self._pack(ranges)

    def _pack(self, ranges: Sequence[tuple[int, int]]) -> list[MicroBatch]:
        """Pack each range of sequences."""
        shared = [self._sharing(a, b) for a, b in ranges]
        sizes = [pack_size(one.size, self._pad_multiple) for one in shared]
        # Pipeline stages exchange activations of one shape.
        if self._parallel.pp_size > 1:
            sizes = [max(sizes)] * len(sizes)
        mtp = self.mtp_coef > 0
        return [
            make_micro_batch(
                self.batch, a, b, size, self._device, self._parallel.cp, sharing, mtp=mtp
            )
            for (a, b), size, sharing in zip(ranges, sizes, shared)
        ]

    def _sharing(self, first: int, last: int) -> Sharing:
        """The slots of the tokens of sequences [first, last) in their pack."""
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
        """The loss's statistics of a whole optimizer step, by name; None if there are none.

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


def _shares(batch: RolloutBatch, shards: ShardMap) -> list[Share]:
    """The tensors for each data-parallel rank, as views, so that the batch is not copied."""
    lengths = batch.lengths.tolist()
    by_name: dict[str, Sequence[Sequence[Tensor]]] = {
        "tokens": shards.split(batch.tokens, lengths),
        "loss_mask": shards.split(batch.loss_mask, lengths),
    }
    if batch.routed_experts is not None:
        by_name["routed_experts"] = shards.split(batch.routed_experts, lengths)
    if batch.sampling_mask is not None:
        masks = batch.sampling_mask
        sizes = masks.offsets[batch.cu_seqlens].diff().tolist()
        by_name["mask_tokens"] = shards.split(masks.tokens, sizes)
        counts = map(_joined, shards.split(masks.offsets.diff()))
        zero = torch.zeros(1, dtype=torch.int64)
        by_name["mask_offsets"] = [[zero, own.cumsum(0)] for own in counts]
    if batch.versions is not None:
        versions, spans = batch.versions.cut(batch.cu_seqlens)
        by_name["version_values"] = shards.split(versions.values, spans.tolist())
        by_name["version_lengths"] = shards.split(versions.lengths, spans.tolist())
    for name, value in batch.vectors.items():
        if name in PER_SEQUENCE and name not in ON_RANK_0:
            by_name[name] = [[_plain(value)[list(order)]] for order in shards.orders]
        elif name not in ON_RANK_0:
            by_name[name] = shards.split(_plain(value))
    shares = [
        {name: parts[d] for name, parts in by_name.items()} for d in range(len(shards.orders))
    ]
    for share, order in zip(shares, shards.orders):
        ends = accumulate((lengths[i] for i in order), initial=0)
        share["cu_tokens"] = [torch.tensor([*ends], dtype=torch.int64)]
    return shares


def _steps(
    batch: RolloutBatch, plans: Sequence[MinibatchPlan], d: int
) -> list[tuple[list[int], int]]:
    """The fields of each `LocalMinibatch` of data-parallel rank `d`."""
    lengths = batch.lengths
    steps: list[tuple[list[int], int]] = []
    first = 0
    for plan in plans:
        everyone = [i for rank in range(len(plan.microbatches)) for i in plan.sequences(rank)]
        offsets = list(accumulate(map(len, plan.microbatches[d]), initial=first))
        steps.append((offsets, int(lengths[everyone].sum())))
        first = offsets[-1]
    return steps


def _scatter(shares: Sequence[Share] | None, parallel: ParallelState) -> dict[str, Tensor]:
    """Send `shares[d]` of rank 0 to every rank of replica d. Collective.

    The parts of a tensor are joined when it is sent.
    """
    if parallel.world_size == 1:
        assert shares is not None
        return {name: _joined(parts) for name, parts in shares[0].items()}
    layouts = None
    if shares is not None:
        layouts = [{name: _layout(parts) for name, parts in share.items()} for share in shares]
    layouts = broadcast_json(layouts, 0, parallel.control_group)
    leader = parallel.replica_leaders[parallel.dp_rank]
    if shares is not None:
        own = {name: _joined(parts) for name, parts in shares[0].items()}
        for share, other in list(zip(shares, parallel.replica_leaders))[1:]:
            for parts in share.values():
                for data in _raw([_joined(parts)]):
                    dist.send(data, other, group=parallel.control_group)
    else:
        own = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (dtype, shape) in layouts[parallel.dp_rank].items()
        }
        if parallel.rank == leader:
            for data in _raw(own.values()):
                dist.recv(data, 0, group=parallel.control_group)
    if parallel.replica_group.size() > 1:
        for data in _raw(own.values()):
            dist.broadcast(data, leader, group=parallel.replica_group)
    return own


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """The tensor joined from parts, always a copy; a scalar is a single part."""
    return parts[0].clone() if len(parts) == 1 else torch.cat([*parts])


def _layout(parts: Sequence[Tensor]) -> tuple[str, list[int]]:
    """The dtype and shape of the tensor joined from parts."""
    first = parts[0]
    shape = [*first.shape] if len(parts) == 1 else [sum(map(len, parts)), *first.shape[1:]]
    return str(first.dtype).removeprefix("torch."), shape


def _raw(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The bytes of each tensor that is not empty: uint8, a view if the tensor is contiguous."""
    return [t.contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel()]


def _gather(
    own: Tensor | None, sizes: Sequence[tuple[int, int]], parallel: ParallelState
) -> list[Tensor] | None:
    """Gather a tensor of each replica's last stage to rank 0, in replica order. Collective.

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
