"""The slots of a pack over context-parallel ranks, and the keys that each query sees.

A sequence of n tokens, padded at its end to a multiple of 2 * CP, is split into 2 * CP chunks; rank
r holds chunks r and 2 * CP - 1 - r. So every rank has an early and a late part of each sequence,
and causal attention costs every rank the same.

Sequences may share a prefix, whose tokens the pack holds once (`rlcore.data.packing.sharing`). The
pack then holds only the rest of such a sequence as its own tokens; its queries see the prefix and
the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from backends.megatron.batch.scan import Scan
from backends.megatron.parallel.state import ALONE, CPRank


def own_slots(lengths: Sequence[int], cp: CPRank) -> Tensor:
    """The slots of the whole pack that this rank holds, in the rank's order: int64 [T / CP].

    `lengths` include padding.
    """
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    chunk = sizes // cp.chunks
    runs = torch.stack([starts + own * chunk for own in cp.own_chunks], dim=1).view(-1)
    return ranges(runs, chunk.repeat_interleave(len(cp.own_chunks)))


@dataclass(frozen=True)
class LengthBucket:
    """Runs of queries of similar length, padded on the right to the longest run.

    A pad repeats the run's last slot.
    """

    queries: Tensor  # int64 [b, longest]: slots
    keys: Tensor  # int64 [b, longest]: rows of the gathered keys
    # int64 [b, 1, 1, 1]: number of keys before a run's first query; None: 0 for every run
    before: Tensor | None


@dataclass(frozen=True)
class LengthBuckets:
    """All queries of a pack for batched attention.

    A query never sees a later key, so pads on the right need no mask.
    """

    parts: tuple[LengthBucket, ...]
    restore: Tensor  # int64 [T]: slot t is this row of the concatenated parts
    identity: bool  # one part without pads: gathering would change nothing


@dataclass(frozen=True)
class Chunk:
    """One chunk of every sequence with all keys up to its end, for a variable-length kernel."""

    queries: Tensor | None  # int64: slots; None: all in order
    keys: Tensor | None  # int64: rows of the gathered keys; None: all in order
    cu_queries: Tensor  # int32 [n+1]
    cu_keys: Tensor  # int32 [n+1]
    longest_queries: int
    longest_keys: int


@dataclass(frozen=True)
class Chunks:
    """All queries of a pack for variable-length attention: front chunks, then back chunks.

    Without context parallelism there is one part.
    """

    parts: tuple[Chunk, ...]
    # int64 [T]: slot t is this row of the concatenated parts; None: the parts are in order
    restore: Tensor | None


@dataclass(frozen=True)
class Runs:
    """Runs of queries with the keys of each, concatenated.

    Attributes:
        queries: int64, slots of this rank.
        keys: int64, rows of the gathered keys.
        num_queries, num_keys: int64 [n], of each run.
        causal: whether the last keys of a run are its queries, each of which sees the keys up to
            itself; otherwise every query sees all keys of its run.
    """

    queries: Tensor
    keys: Tensor
    num_queries: Tensor
    num_keys: Tensor
    causal: bool = True

    @classmethod
    def of(cls, lengths: Sequence[int], cp: CPRank, index: int) -> Runs:
        """Lay out chunk `index` of the rank, of each sequence.

        A chunk is a run of queries, with the keys from the sequence's start to the run's end.
        """
        sizes = torch.tensor(lengths, dtype=torch.int64)
        share = sizes // cp.size
        chunk = sizes // cp.chunks
        starts = share.cumsum(0) - share
        total = int(share.sum())
        # The visible chunks, in the order of the sequence.
        seen = range(cp.own_chunks[index] + 1)
        # Chunk k is the first chunk of rank k, or the second of rank `chunks` - 1 - k.
        mirrored = [cp.chunks - 1 - k for k in seen]
        rows = [min(k, m) * total + starts + int(k > m) * chunk for k, m in zip(seen, mirrored)]
        return cls(
            queries=ranges(starts + index * chunk, chunk),
            keys=ranges(torch.stack(rows, dim=1).view(-1), chunk.repeat_interleave(len(seen))),
            num_queries=chunk,
            num_keys=chunk * len(seen),
        )

    def behind(self, counts: Tensor, rows: Tensor) -> Runs:
        """Return the same runs with `counts` further keys before each, at `rows`."""
        num_keys = counts + self.num_keys
        starts = offsets(num_keys)[:-1]
        keys = torch.empty(int(num_keys.sum()), dtype=torch.int64)
        keys[ranges(starts, counts)] = rows
        keys[ranges(starts + counts, self.num_keys)] = self.keys
        return replace(self, num_keys=num_keys, keys=keys)


def prefix_part(queries: Tensor, num_queries: Tensor, keys: Tensor, num_keys: Tensor) -> Runs:
    """Join the runs behind one prefix, for every prefix.

    Args:
        queries: int64, the slots of all runs, concatenated.
        keys: int64, the rows of each run's prefix, concatenated; equal prefixes have equal rows.
        num_queries, num_keys: int64 [n]; values may be 0.
    """
    begins = offsets(num_queries).tolist()
    starts = offsets(num_keys)[:-1]
    behind = num_keys.nonzero()[:, 0]
    last = keys[starts[behind] + num_keys[behind] - 1]
    # A prefix is identified by its last row and its length.
    runs_of: dict[tuple[int, int], list[int]] = {}
    for run, row, length in zip(behind.tolist(), last.tolist(), num_keys[behind].tolist()):
        runs_of.setdefault((row, length), []).append(run)
    rows: list[Tensor] = []
    prefixes: list[Tensor] = []
    for (_, length), runs in runs_of.items():
        rows += [queries[begins[run] : begins[run + 1]] for run in runs]
        start = int(starts[runs[0]])
        prefixes.append(keys[start : start + length])
    return Runs(
        torch.cat(rows),
        torch.cat(prefixes),
        torch.stack([num_queries[runs].sum() for runs in runs_of.values()]),
        torch.tensor([length for _, length in runs_of]),
        causal=False,
    )


@dataclass(frozen=True)
class Prefixes:
    """The tokens of other sequences that each sequence of a pack sees before its own."""

    counts: Tensor  # int64 [n]: prefix tokens of each sequence
    slots: Tensor  # int64 [sum of counts]: their slots in the whole pack, concatenated
    longest: int  # tokens of the longest sequence, prefix included


@dataclass(frozen=True)
class PackLayout:
    """The layout of a pack for attention and rotary positions, computed once for all layers.

    `T` is the number of slots of this rank; gathered keys and values are concatenated by rank,
    [CP * T].
    """

    # Own tokens of every sequence of the pack, over all ranks; each at least 1.
    lengths: tuple[int, ...]
    cp: CPRank
    device: torch.device
    positions: Tensor  # int64 [T]: position inside the sequence
    # All tokens of every sequence, prefix included, without the pads at its end.
    totals: tuple[int, ...]
    prefixes: Prefixes | None = None  # None: nothing is shared

    @classmethod
    def of_lengths(
        cls,
        lengths: Sequence[int],
        device: torch.device,
        cp: CPRank = ALONE,
        prefixes: Prefixes | None = None,
        totals: Sequence[int] | None = None,
    ) -> PackLayout:
        """Lay out sequences of these lengths, multiples of `cp.chunks`; drop empty sequences.

        Args:
            prefixes: the prefixes of the sequences that are not dropped.
            totals: the tokens of these sequences; default: `lengths`, without prefix or pads.
        """
        present = tuple(n for n in lengths if n)
        sizes = torch.tensor(present, dtype=torch.int64)
        starts = torch.zeros_like(sizes) if prefixes is None else prefixes.counts
        whole = ranges(starts, sizes)
        positions = whole[own_slots(present, cp)].to(device)
        return cls(present, cp, device, positions, tuple(totals or present), prefixes)

    @cached_property
    def sequence_lengths(self) -> Tensor:
        """The tokens of each slot's sequence: int64 [T]."""
        each = torch.tensor(self.totals).repeat_interleave(torch.tensor(self.lengths))
        return each[own_slots(self.lengths, self.cp)].to(self.device)

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max(self.lengths) if self.prefixes is None else self.prefixes.longest

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """The offsets of the sequences over all ranks: int32 [n+1], on the device.

        Raises ValueError if sequences share a prefix: no single range holds all keys of a sequence.
        """
        if self.prefixes is not None:
            raise ValueError("sequences that share a prefix have no offsets of their own")
        return offsets(torch.tensor(self.lengths, dtype=torch.int64)).int().to(self.device)

    @cached_property
    def buckets(self) -> LengthBuckets:
        """The queries by length, for `bucketed_attention`."""
        parts: list[LengthBucket] = []
        total = len(self.positions)
        restore = torch.empty(total, dtype=torch.int64)
        filled = 0
        for runs in self.runs:
            for bucket in self._alike(runs):
                queries, real = padded(runs.queries, runs.num_queries, bucket)
                keys, _ = padded(runs.keys, runs.num_keys, bucket)
                before = (runs.num_keys - runs.num_queries)[bucket].view(-1, 1, 1, 1)
                restore[queries[real]] = filled + torch.arange(real.numel()).view_as(real)[real]
                filled += real.numel()
                first = not before.any()
                parts.append(
                    LengthBucket(
                        queries.to(self.device),
                        keys.to(self.device),
                        None if first else before.to(self.device),
                    )
                )
        in_order = self.cp.size == 1 and len(parts) == 1 and filled == total
        identity = in_order and torch.equal(restore, torch.arange(total))
        return LengthBuckets(tuple(parts), restore.to(self.device), identity)

    @cached_property
    def chunks(self) -> Chunks:
        """The queries by chunk, for `varlen_attention`."""
        alone = self.cp.size == 1
        parts = tuple(
            Chunk(
                queries=None if alone else runs.queries.to(self.device),
                keys=None if alone and self.prefixes is None else runs.keys.to(self.device),
                cu_queries=offsets(runs.num_queries).int().to(self.device),
                cu_keys=offsets(runs.num_keys).int().to(self.device),
                longest_queries=int(runs.num_queries.max()),
                longest_keys=int(runs.num_keys.max()),
            )
            for runs in self.runs
        )
        if alone:
            return Chunks(parts, None)
        slots = torch.cat([runs.queries for runs in self.runs])
        return Chunks(parts, slots.argsort().to(self.device))

    @cached_property
    def scan(self) -> Scan:
        """The chunks of the whole sequences, for layers that carry a state.

        Raises ValueError if sequences share a prefix: the state at its end belongs to several.
        """
        if self.prefixes is not None:
            raise ValueError("sequences that share a prefix have no state of their own")
        return Scan.of_lengths(self.lengths, self.device)

    @cached_property
    def order(self) -> tuple[Tensor, Tensor]:
        """The whole pack in the order of its sequences, from slots concatenated by rank, and back.

        Both are int64 [CP * T]: the first gives the row of each slot, the second inverts it.
        """
        slots = self._slots_by_rank
        return slots.argsort().to(self.device), slots.to(self.device)

    @cached_property
    def parts(self) -> tuple[Runs, ...]:
        """Two parts for each chunk: the sequences' own tokens, and the runs behind each prefix."""
        assert self.prefixes is not None
        counts = self.prefixes.counts
        rows = self._prefix_rows(self.prefixes)
        found: list[Runs] = []
        for runs in self._own_runs:
            found += [runs, prefix_part(runs.queries, runs.num_queries, rows, counts)]
        return tuple(found)

    @property
    def runs(self) -> list[Runs]:
        """The runs of each chunk, with the keys of their prefixes before their own."""
        if self.prefixes is None:
            return self._own_runs
        rows = self._prefix_rows(self.prefixes)
        return [runs.behind(self.prefixes.counts, rows) for runs in self._own_runs]

    @property
    def _own_runs(self) -> list[Runs]:
        return [Runs.of(self.lengths, self.cp, index) for index in range(len(self.cp.own_chunks))]

    def _prefix_rows(self, prefixes: Prefixes) -> Tensor:
        """The rows of the prefixes' tokens among the gathered keys."""
        return self._slots_by_rank.argsort()[prefixes.slots]

    @property
    def _slots_by_rank(self) -> Tensor:
        """The slots of the whole pack that the ranks hold, concatenated by rank."""
        ranks = [CPRank(self.cp.size, rank) for rank in range(self.cp.size)]
        return torch.cat([own_slots(self.lengths, rank) for rank in ranks])

    def _alike(self, runs: Runs) -> list[list[int]]:
        """Group the runs with similar numbers of queries and of keys.

        Runs without keys before their queries form groups of their own, as they need no mask.
        """
        queries = runs.num_queries.tolist()
        # Without prefixes the number of keys follows from the number of queries.
        if self.prefixes is None:
            return by_length(queries)
        keys = runs.num_keys.tolist()
        found = []
        for before in (False, True):
            some = [i for i, n in enumerate(queries) if (keys[i] > n) is before]
            for by_keys in by_length([keys[i] for i in some]):
                members = [some[i] for i in by_keys]
                parts = by_length([queries[i] for i in members])
                found += [[members[i] for i in part] for part in parts]
        return found


# --- ragged rows of indices -----------------------------------------------------------------------

MIN_BUCKET = 16


def padded(flat: Tensor, counts: Tensor, runs: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Some runs of `flat`, padded with their last element: [b, longest], and a mask like it.

    The mask is False at pads.
    """
    rows = torch.tensor(runs, dtype=torch.int64)
    sizes = counts[rows, None]
    column = torch.arange(int(counts[rows].max()))
    index = offsets(counts)[rows, None] + torch.minimum(column, sizes - 1)
    return flat[index], column < sizes


def offsets(counts: Tensor) -> Tensor:
    """[n] -> [n+1] running sums from 0."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def ranges(starts: Tensor, counts: Tensor) -> Tensor:
    """The ranges `start : start + count`, concatenated."""
    total = int(counts.sum())
    return torch.arange(total) + (starts - offsets(counts)[:-1]).repeat_interleave(
        counts, output_size=total
    )


def by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group the indices of lengths that round up to the same value of 16, 24, 32, 48, 64, ...

    So at most a third of a bucket is padding, except in the first.
    """
    buckets: dict[int, list[int]] = {}
    for i, n in enumerate(lengths):
        ceiling = MIN_BUCKET
        while ceiling < n:
            ceiling = ceiling * 3 // 2 if ceiling & (ceiling - 1) == 0 else ceiling * 4 // 3
        buckets.setdefault(ceiling, []).append(i)
    return [buckets[ceiling] for ceiling in sorted(buckets)]
