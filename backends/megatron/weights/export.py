"""Gathering Megatron parameters as Hugging Face tensors, for a publication or a folder on disk.

Every rank of the first model replica (for experts: of the first that holds them) copies its part of
a bucket into one flat buffer and sends it straight to rank 0, which puts the parts into the bucket.
So each weight is sent once, a bucket costs one message a rank however many tensors it holds, and
the pipeline stages convert and send independently of one another. A large part is sent by itself:
straight from the parameter if its bytes are those of the bucket, and straight into the bucket if it
is rows of its tensor. Rank 0 prefetches: it gathers the next bucket while the last is on its way to
the engines. If several ranks send to engines, every rank needs the bucket: the rank with the most
bytes of it assembles and broadcasts it, and all ranks prefetch. The rank that assembles a bucket
also rounds it to FP8 if the engines take FP8.

Rank 0 announces each bucket that it begins, and a sender enqueues a bucket once rank 0 has begun
the one before it. NCCL starts the timeout of an operation when it is enqueued: without the
announcements all buckets would be enqueued at the start, and the last ones would time out in a long
publication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.layout import Piece, piece_of, unpack
from backends.megatron.convert.table import Entry, Split
from backends.megatron.parallel.agreement import raise_on_all_ranks
from backends.megatron.parallel.state import ParallelState
from backends.megatron.weights.prefetch import prefetched
from backends.megatron.weights.tensors import SentPart, Source, exported, sources_of
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import ModelError
from rlcore.planning.publication import bucket_limit
from rlcore.quantised_weights import quantise_bucket, quantised_bucket
from rlcore.weights import Bucket, cut_buckets

Head = Literal["lm", "value"]

# Number of buffers: one is being sent, or (on rank 0) consumed, while the next is filled.
_IN_FLIGHT = 2
_ALONE_BYTES = 1 << 20  # from this size on, a separate message costs less than the copies


@dataclass(frozen=True)
class _Coordinates:
    """The coordinates of one rank in the layout."""

    tp: int
    stage: int
    replica: int  # among the copies of the dense weights
    etp: int
    ep: int
    expert_replica: int  # ... and of the experts'


class WeightExporter:
    """Gathers the weights of a model to rank 0 under their Hugging Face names.

    Create it once (collective) and use it for every publication: its buffers and its process group
    are reused.

    Args:
        bucket_bytes: the most bytes of a bucket; adapters are one bucket.
        adapters: gather the factors of the model's adapters, not its weights.
        merged: add the adapters' products to the weights.
        quantised: yield buckets in FP8 (rlcore/quantised_weights.py).
        sharing: another exporter of the same model, whose process group this one uses.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        arch: Architecture,
        parallel: ParallelState,
        *,
        dtype: torch.dtype,
        head: Head = "lm",
        bucket_bytes: int = 256 << 20,
        adapters: LoraConfig | None = None,
        merged: bool = True,
        quantised: bool = False,
        sharing: WeightExporter | None = None,
    ) -> None:
        self.arch = arch
        self.parallel = parallel
        self.head = head
        self._exported = exported(chunks, arch, dtype, head, adapters, merged=merged)
        self.specs = self._exported.specs
        self._shapes = self._exported.shapes
        size = sum(spec.num_bytes for spec in self.specs)
        self.buckets = cut_buckets(self.specs, bucket_limit(size, bucket_bytes))
        if adapters is not None:
            # An engine takes an adapter as a whole.
            self.buckets = (Bucket(0, tuple(self.specs)),)
        self.quantised = quantised
        # The buckets as they are yielded.
        self.layout = tuple(map(quantised_bucket, self.buckets)) if quantised else self.buckets
        self._params = self._exported.held
        self._device = next(chunks[0].parameters()).device
        self._padded_vocab = self._agree_on_vocab(self._exported.vocabulary_rows)
        self._ranks = self._gather_coordinates()
        # There are as many kinds of sources as stages, and each looks at the ranks of its own.
        self._ranks_of_stages: dict[int, list[int]] = {}
        for rank, at in enumerate(self._ranks):
            self._ranks_of_stages.setdefault(at.stage, []).append(rank)
        self._sources = self._find_sources()
        self._found: dict[tuple[int, int | None, Split], list[int]] = {}
        # The ranks other than rank 0 that contribute to a bucket.
        ranks = {
            rank
            for source in self._sources.values()
            for entry, _ in source.parts
            for rank in self._contributors(entry, source.stage)
        }
        self._senders = sorted(ranks - {0})
        self._group: ProcessGroup | None = self._make_group() if sharing is None else sharing._group
        # Bucket index -> the parts of each sending rank.
        self._plans: dict[int, dict[int, list[SentPart]]] = {}
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._unrounded: ModelError | None = None

    @torch.no_grad()
    def export_buckets(self, *, everywhere: bool = False) -> Iterator[tuple[Bucket, Tensor | None]]:
        """Yield `layout` in order with its bytes: uint8 [num_bytes] on rank 0, None elsewhere.

        Collective; iterate to the end on every rank. The bytes are overwritten when the next bucket
        is requested. Nothing else may use the ranks' group until the end.

        Args:
            everywhere: yield the bytes on every rank.

        Raises:
            ModelError, FailedElsewhere: weights cannot be rounded to FP8; raised on every rank
                after the last bucket.
        """
        self._unrounded = None
        announced: list[dist.Work] = []
        if everywhere:
            make = partial(self._shared, announced=announced)
            yield from prefetched(make, self.buckets, self._device)
        elif self.parallel.rank == 0:
            make = partial(self._gathered, announced=announced)
            yield from prefetched(make, self.buckets, self._device)
        else:
            sending: list[list[dist.Work]] = [[] for _ in range(_IN_FLIGHT)]
            for bucket in self.buckets:
                # Wait until rank 0 has begun the previous bucket.
                if bucket.index > 0:
                    self._announce()
                slot = bucket.index % _IN_FLIGHT
                _wait(sending[slot])
                sending[slot] = self._send(bucket, slot)
                yield self.layout[bucket.index], None
            for works in sending:
                _wait(works)
        _wait(announced)
        if self.quantised:
            with raise_on_all_ranks(self.parallel, "rounding the weights to FP8"):
                if self._unrounded is not None:
                    raise self._unrounded

    def free_buffers(self) -> None:
        """Free the buffers until the next export."""
        self._buffers = {}

    # --- one bucket -------------------------------------------------------------------------------

    def _gathered(self, bucket: Bucket, announced: list[dist.Work]) -> tuple[Bucket, Tensor]:
        """On rank 0, announce and assemble a bucket; append the broadcasts to `announced`."""
        if bucket is not self.buckets[-1]:
            announced.extend(self._announce())
        return self.layout[bucket.index], self._in_form(bucket, self._gather(bucket))

    def _shared(self, bucket: Bucket, announced: list[dist.Work]) -> tuple[Bucket, Tensor]:
        """Assemble a bucket on the rank with the most bytes of it, and broadcast it from there."""
        here = self.parallel.rank
        if here and bucket.index > 0:
            self._announce(everybody=True)
        slot = bucket.index % _IN_FLIGHT
        root = self._root(bucket)
        sending: list[dist.Work] = []
        if here == root:
            flat = self._in_form(bucket, self._gather(bucket))
        else:
            flat = self._published(bucket)
            sending = self._send(bucket, slot, root)
        # The order is the same on every rank: two communicators must not wait for each other.
        if self.parallel.world_size > 1:
            dist.broadcast(flat, root)
        if here == 0 and bucket is not self.buckets[-1]:
            announced.extend(self._announce(everybody=True))
        _wait(sending)
        return self.layout[bucket.index], flat

    def _in_form(self, bucket: Bucket, flat: Tensor) -> Tensor:
        """The bytes of a bucket in the dtype that is yielded."""
        if not self.quantised:
            return flat
        out = self._published(bucket)
        try:
            quantise_bucket(bucket, flat, out)
        # Recovery: yield every bucket, then raise on all ranks; peers would wait for this one now.
        except ModelError as error:
            self._unrounded = self._unrounded or error
        return out

    def _published(self, bucket: Bucket) -> Tensor:
        """The buffer of a bucket that is yielded."""
        size = self.layout[bucket.index].num_bytes
        return self._buffer("published", bucket.index % _IN_FLIGHT, size)

    def _root(self, bucket: Bucket) -> int:
        """The rank with the most bytes of a bucket; assembling there sends the least."""
        plan = self._plan(bucket)
        sizes = {rank: sum(part.num_bytes for part in parts) for rank, parts in plan.items()}
        return max(sorted(sizes), key=lambda rank: sizes[rank])

    def _gather(self, bucket: Bucket) -> Tensor:
        """Receive every other rank's parts, and copy this rank's own meanwhile."""
        here = self.parallel.rank
        # One buffer is enough: a bucket is rounded before the next one is gathered.
        if self.quantised:
            flat = self._buffer("whole", 0, bucket.num_bytes)
        else:
            flat = self._published(bucket)
        out = dict(bucket.views(flat))
        arrivals: list[tuple[list[SentPart], Tensor]] = []
        receives: list[dist.P2POp] = []
        messages = {
            rank: self._messages(bucket, rank)
            for rank in sorted(self._plan(bucket).keys() - {here})
        }
        asides = {
            rank: [part for part in alone if not part.piece.contiguous] + packed
            for rank, (alone, packed) in messages.items()
        }
        sizes = {rank: sum(part.num_bytes for part in asides[rank]) for rank in messages}
        buffers = self._buffer("receive", 0, sum(sizes.values())).split(list(sizes.values()))
        for buffer, (rank, (alone, packed)) in zip(buffers, messages.items()):
            aside = asides[rank]
            pieces = {part.key: piece for part, piece in _pieces(aside, buffer)}
            into = [
                _raw(pieces.get(part.key, part.piece.of(out[part.spec.name]))) for part in alone
            ]
            if packed:
                into.append(_tail(buffer, packed))
            arrivals.append((aside, buffer))
            receives += [dist.P2POp(dist.irecv, memory, rank, self._group) for memory in into]
        works = dist.batch_isend_irecv(receives) if receives else []
        for part in self._parts(bucket, here):
            self._copy_own(part, part.piece.of(out[part.spec.name]))
        _wait(works)
        for parts, buffer in arrivals:
            for part, piece in _pieces(parts, buffer):
                part.piece.of(out[part.spec.name]).copy_(piece)
        return flat

    def _send(self, bucket: Bucket, slot: int, root: int = 0) -> list[dist.Work]:
        """Start sending this rank's parts to the rank that assembles the bucket."""
        alone, packed = self._messages(bucket, self.parallel.rank)
        pieces = {part.key: self._own(part) for part in alone}
        copied = [part for part in alone if not _is_sent_as(part, pieces[part.key])] + packed
        buffer = self._buffer("send", slot, sum(part.num_bytes for part in copied))
        for part, piece in _pieces(copied, buffer):
            self._copy_own(part, piece)
            pieces[part.key] = piece
        out = [_raw(pieces[part.key]) for part in alone]
        if packed:
            out.append(_tail(buffer, packed))
        sends = [dist.P2POp(dist.isend, memory, root, self._group) for memory in out]
        return list(dist.batch_isend_irecv(sends)) if sends else []

    def _announce(self, *, everybody: bool = False) -> list[dist.Work]:
        """Broadcast from rank 0 that it begins a bucket; the other ranks wait for the broadcast.

        All ranks take part, so that no rank waits longer than a bucket takes.

        Args:
            everybody: announce even if no rank sends to rank 0.
        """
        if not (self._senders or everybody) or self.parallel.world_size == 1:
            return []
        group = self.parallel.control_group
        work = dist.broadcast(torch.empty(1), 0, group=group, async_op=self.parallel.rank == 0)
        return [] if work is None else [work]

    def _messages(self, bucket: Bucket, rank: int) -> tuple[list[SentPart], list[SentPart]]:
        """The parts of a bucket that `rank` sends one by one, and those of its last message."""
        alone: list[SentPart] = []
        packed: list[SentPart] = []
        for part in self._parts(bucket, rank):
            (alone if part.num_bytes >= _ALONE_BYTES else packed).append(part)
        return alone, packed

    def _parts(self, bucket: Bucket, rank: int) -> list[SentPart]:
        """The parts of a bucket that `rank` sends, the same list on rank 0 and the sender."""
        return self._plan(bucket).get(rank, [])

    def _plan(self, bucket: Bucket) -> dict[int, list[SentPart]]:
        """The parts of each sending rank; most ranks send nothing."""
        if bucket.index not in self._plans:
            plan = self._plans[bucket.index] = {}
            for spec in bucket.tensors:
                source = self._sources[spec.name]
                for entry, index in source.parts:
                    for rank in self._contributors(entry, source.stage):
                        piece = self._piece(entry, index, self._ranks[rank])
                        part = SentPart(spec, entry, index, piece)
                        if part.num_bytes:
                            plan.setdefault(rank, []).append(part)
        return self._plans[bucket.index]

    def _contributors(self, entry: Entry, stage: int) -> list[int]:
        """The ranks that send a part of an entry; of ranks with equal parts the first does."""
        expert = entry.expert
        split = entry.split
        # The expert-parallel rank that holds an expert's weight; None for a dense weight.
        owner = None if expert is None else expert * self.parallel.ep_size // self.arch.num_experts

        def contributes(at: _Coordinates) -> bool:
            whole = split is Split.REPLICATED
            if owner is not None:
                return (at.ep, at.expert_replica) == (owner, 0) and not (whole and at.etp)
            return at.replica == 0 and not (whole and at.tp)

        kind = (stage, owner, split)
        if kind not in self._found:
            ranks = self._ranks_of_stages[stage]
            self._found[kind] = [rank for rank in ranks if contributes(self._ranks[rank])]
        return self._found[kind]

    def _piece(self, entry: Entry, index: int, at: _Coordinates) -> Piece:
        p = self.parallel
        rank, size = (at.tp, p.tp_size) if entry.expert is None else (at.etp, p.etp_size)
        return piece_of(entry, index, self.arch, rank, size, self._padded_vocab)

    def _copy_own(self, part: SentPart, out: Tensor) -> None:
        """Copy this rank's piece of a tensor into `out`, with the dtype and shape of `out`."""
        own = self._own(part)
        out.view(own.shape).copy_(own)

    def _own(self, part: SentPart) -> Tensor:
        """This rank's piece of a tensor, a view of the parameter.

        It may be strided, and have another shape or dtype than in the bucket.
        """
        at = self._ranks[self.parallel.rank]
        entry = part.entry
        rows = [self._piece(entry, index, at).shape[0] for index in range(len(entry.parts))]
        param = self._params[entry.megatron].data
        pieces = unpack(entry.split, param, self.arch.sizes[entry.group], rows)
        return self._exported.merged(entry, part.index, pieces[part.index])

    # --- agreement between ranks ------------------------------------------------------------------

    def _gather_coordinates(self) -> list[_Coordinates]:
        """The coordinates of every rank of the world."""
        p = self.parallel
        replica = p.dp_rank * p.cp_size + p.cp_rank
        own = torch.tensor([p.tp_rank, p.pp_rank, replica, p.etp_rank, p.ep_rank, p.edp_rank])
        gathered = [torch.empty_like(own) for _ in range(p.world_size)]
        dist.all_gather(gathered, own, group=p.control_group)
        return [_Coordinates(*numbers.tolist()) for numbers in gathered]

    def _agree_on_vocab(self, rows: int) -> int:
        """The padded vocabulary size, also on stages without embeddings: they plan with it too.

        Args:
            rows: of this rank's tensors that are split along the vocabulary; 0 without one.
        """
        padded = torch.tensor([rows * self.parallel.tp_size])
        dist.all_reduce(padded, op=dist.ReduceOp.MAX, group=self.parallel.control_group)
        return int(padded)

    def _find_sources(self) -> dict[str, Source]:
        """The source of every tensor."""
        entries = self._exported.entries
        stages = torch.tensor(
            [self.parallel.pp_rank if entry.megatron in self._params else -1 for entry in entries]
        )
        dist.all_reduce(stages, op=dist.ReduceOp.MAX, group=self.parallel.control_group)
        for entry, stage in zip(entries, stages.tolist()):
            if stage < 0:
                raise KeyError(f"{entry.megatron}: no pipeline stage holds this parameter")
        return sources_of(zip(entries, stages.tolist()))

    def _make_group(self) -> ProcessGroup | None:
        """Create the group of rank 0 and the senders; None if no rank sends. Collective.

        NCCL creates a communicator at the first call of its group, in which all ranks must take
        part. Only some ranks take part in a send to rank 0, so this makes the first call.
        """
        if not self._senders:
            return None
        ranks = [0, *self._senders]
        on_gpu = self._device.type == "cuda"
        group = dist.new_group(
            ranks,
            timeout=timedelta(seconds=self.parallel.timeout_s),
            # The default group's backend includes gloo.
            backend="nccl" if on_gpu else None,
            group_desc="PUBLICATION",
        )
        if self.parallel.rank in ranks:
            dist.all_reduce(torch.zeros(1, device=self._device), group=group)
        return group

    def _buffer(self, kind: str, key: int, size: int) -> Tensor:
        """The first `size` bytes of a buffer, which grows to the largest size asked for."""
        buffer = self._buffers.get((kind, key))
        if buffer is None or buffer.numel() < size:
            buffer = None
            # Free the old buffer before the new one is allocated.
            self._buffers.pop((kind, key), None)
            buffer = self._buffers[kind, key] = torch.empty(
                size, dtype=torch.uint8, device=self._device
            )
        return buffer[:size]


def _is_sent_as(part: SentPart, own: Tensor) -> bool:
    """Whether a rank's piece has the same bytes as in the bucket."""
    return own.is_contiguous() and own.dtype == part.spec.torch_dtype


def _raw(tensor: Tensor) -> Tensor:
    """A view of the bytes of a contiguous tensor: uint8 [n]."""
    return tensor.view(-1).view(torch.uint8)


def _pieces(parts: Sequence[SentPart], buffer: Tensor) -> Iterator[tuple[SentPart, Tensor]]:
    """Yield each part with its view in a flat buffer."""
    at = 0
    for part in parts:
        flat = buffer[at : at + part.num_bytes]
        yield part, flat.view(part.spec.torch_dtype).view(part.shape)
        at += part.num_bytes


def _tail(buffer: Tensor, parts: Sequence[SentPart]) -> Tensor:
    """The end of a buffer, which holds the last parts."""
    return buffer[buffer.numel() - sum(part.num_bytes for part in parts) :]


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
