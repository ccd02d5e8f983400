"""The packed tensors of a micro-batch, from a rank's share of a batch.

Context-parallel ranks share a pack, and exchange keys, values and the results of the head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from backends.megatron.batch.cp_layout import PackLayout, Prefixes, own_slots, ranges
from backends.megatron.batch.rotary import Angles
from backends.megatron.convert.rope import Rope
from backends.megatron.parallel.state import ALONE, CPRank
from rlcore.data.batch import BatchSamplingMasks, RolloutBatch
from rlcore.data.packing.plan import padded_length
from rlcore.data.packing.sharing import Sharing, share_nothing


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's `packed_seq_params`, with the layout of the pack and its rotary angles.

    A layer's attention applies the angles of its rotary positions. Megatron itself would split the
    pack sequence by sequence in Python to rotate q and k, in every layer.
    """

    layout: PackLayout | None = None
    angles: Mapping[Rope, Angles] = field(default_factory=dict)


@dataclass(frozen=True)
class NextTokens:
    """What multi-token prediction needs of a pack: the token after each, and its own targets.

    A target is predicted from the slot two tokens before it, and from the token between them. The
    second token of a sequence has no such slot.
    """

    ids: Tensor  # int64 [1, T]: the next token of the sequence; 0 behind its last one
    index: Tensor  # int64 [k]: the slot two before each of this rank's k targets
    tokens: Tensor  # int64 [k]
    own: Tensor  # int64 [k]: indices of the targets among the M trainable tokens
    predicted: Tensor  # int64: the indices of all ranks' targets


@dataclass(frozen=True)
class MicroBatch:
    """One pack of T slots: B consecutive sequences with M trainable tokens, then pads.

    Sequences that begin with the same tokens may have them at the same slots.

    Under context parallelism these are the rank's slots of a pack of CP * T, which hold m of the M
    predictions, and every sequence is padded at its end. Targets are shifted here, before anything
    splits the pack: a token is predicted from the slot of the previous token of its sequence.
    """

    input_ids: Tensor  # int64 [1, T]
    packed: PackedSequences
    target_index: Tensor  # int64 [m]: the slot before each trainable token
    target_tokens: Tensor  # int64 [m]
    target_own: Tensor  # int64 [m]: indices of the targets among the M trainable tokens
    cu_seqlens: Tensor  # int64 [B+1], over trainable tokens
    rows: slice  # of the batch's vectors over trainable tokens
    sequences: slice  # of the batch's vectors with one value a sequence
    num_tokens: int  # model tokens of this rank; a shared token counts once for each sequence
    repeated: Tensor  # bool [model tokens of all ranks]: whether the pack had the token already
    counts: Tensor  # int64 [1, T]: how many sequences have the token at a slot; 0 at a pad
    # Masks of the m targets; None: all were sampled from the whole vocabulary.
    sampling_mask: BatchSamplingMasks | None = None
    # int16 [T, layers with experts, topk] from the engine; -1: not recorded
    routed_experts: Tensor | None = None
    # None: the model has no layer for multi-token prediction.
    next: NextTokens | None = None
    # Layer -> int16 [t, topk]: the experts that training replays, for the t slots that this rank's
    # routers process.
    experts: dict[int, Tensor] = field(default_factory=dict)

    @property
    def padding(self) -> Tensor:
        """bool [1, T]: True at a pad."""
        return self.counts == 0

    @property
    def num_slots(self) -> int:
        """T, including pads."""
        return self.input_ids.size(1)

    @property
    def num_trainable(self) -> int:
        """M, over all ranks that share the pack."""
        return self.rows.stop - self.rows.start


def pad_lengths(missing: int, longest: int, multiple: int = 1) -> list[int]:
    """The lengths of the pad sequences that fill `missing` slots; all are multiples of `multiple`.

    No pad sequence is longer than the longest real one (or 16), so that attention over pads never
    dominates.
    """
    piece = padded_length(max(longest, 16), multiple)
    return [piece] * (missing // piece) + ([missing % piece] if missing % piece else [])


def pack_size(num_tokens: int, multiple: int) -> int:
    """The number of slots of a pack, at least `multiple`: a micro-batch without tokens runs too."""
    return padded_length(max(num_tokens, 1), multiple)


def make_micro_batch(
    batch: RolloutBatch,
    first: int,
    last: int,
    num_slots: int,
    device: torch.device,
    cp: CPRank = ALONE,
    sharing: Sharing | None = None,
    *,
    mtp: bool = False,
) -> MicroBatch:
    """Pack the sequences [first, last) of `batch` on `device`; the range and they may be empty.

    Args:
        num_slots: slots of the pack over all ranks, a multiple of `cp.chunks`; at least the size of
            `sharing`.
        cp: this rank among the ranks that share the pack.
        sharing: the slots of the sequences' tokens; default: a separate slot for each token.
        mtp: add `next`, for which no sequences share slots.
    """
    model = slice(int(batch.cu_tokens[first]), int(batch.cu_tokens[last]))
    rows = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last]))
    lengths = batch.lengths[first:last]
    if sharing is None:
        sharing = share_nothing(lengths, multiple=cp.chunks)
    slots = sharing.slots
    tokens = batch.tokens[model].long()
    layout, local = lay_out(sharing, lengths, num_slots, device, cp)
    ids = tokens.new_zeros(num_slots)
    ids[slots] = tokens
    counts = slots.bincount(minlength=num_slots)
    where = torch.full((num_slots,), -1)
    where[local] = torch.arange(len(local))

    routed = None
    if batch.routed_experts is not None:
        routed = batch.routed_experts.new_full((num_slots, *batch.routed_experts.shape[1:]), -1)
        routed[slots] = batch.routed_experts[model]
        routed = routed[local].to(device)

    trainable = batch.loss_mask[model].nonzero()[:, 0]
    # The slot of the previous token; a trainable token is never the first of its sequence.
    index = where[slots[trainable - 1]]
    own = (index >= 0).nonzero()[:, 0]
    return MicroBatch(
        input_ids=ids[local][None].to(device),
        packed=PackedSequences(
            qkv_format="thd",
            max_seqlen_q=layout.longest,
            max_seqlen_kv=layout.longest,
            layout=layout,
        ),
        target_index=index[own].to(device),
        target_tokens=tokens[trainable[own]].to(device),
        target_own=own.to(device),
        cu_seqlens=(batch.cu_seqlens[first : last + 1] - batch.cu_seqlens[first]).to(device),
        rows=rows,
        sequences=slice(first, last),
        num_tokens=int((where[slots] >= 0).sum()),
        repeated=(torch.arange(len(slots)) < sharing.num_shared).to(device),
        counts=counts[local][None].to(device),
        sampling_mask=(
            None
            if batch.sampling_mask is None
            else batch.sampling_mask.select(rows.start + own).to(device)
        ),
        routed_experts=routed,
        next=_next_tokens(tokens, lengths, slots, local, where, trainable, device) if mtp else None,
    )


def _next_tokens(
    tokens: Tensor,
    lengths: Tensor,
    slots: Tensor,
    local: Tensor,
    where: Tensor,
    trainable: Tensor,
    device: torch.device,
) -> NextTokens:
    """Shift a pack's tokens inside each sequence; see `make_micro_batch` for the other tensors.

    Args:
        trainable: int64 [M], the trainable ones among `tokens`.
    """
    ends = lengths.cumsum(0)
    last = torch.zeros(len(tokens), dtype=torch.bool)
    last[ends[lengths > 0] - 1] = True
    ids = tokens.new_zeros(len(where))
    ids[slots] = torch.where(last, 0, tokens.roll(-1))
    begins = (ends - lengths).repeat_interleave(lengths)
    predicted = (trainable - begins[trainable] >= 2).nonzero()[:, 0]
    index = where[slots[trainable[predicted] - 2]]
    here = index >= 0
    own = predicted[here]
    found = (ids[local][None], index[here], tokens[trainable[own]], own, predicted)
    return NextTokens(*(tensor.to(device) for tensor in found))


def lay_out(
    sharing: Sharing, lengths: Tensor, num_slots: int, device: torch.device, cp: CPRank
) -> tuple[PackLayout, Tensor]:
    """Lay a pack out for attention. Returns the layout, and the slots that this rank holds.

    Args:
        lengths: int64 [B], the lengths of the sequences.
    """
    own = lengths - sharing.shared
    # A sequence without own tokens is the beginning of another sequence.
    runs = sharing.order[own[sharing.order] > 0]
    sizes = [padded_length(n, cp.chunks) for n in own[runs].tolist()]
    sizes += pad_lengths(num_slots - sum(sizes), max(sizes, default=0), cp.chunks)
    counts = torch.zeros(len(sizes), dtype=torch.int64)
    counts[: len(runs)] = sharing.shared[runs]
    prefixes = None
    if counts.any():
        begins = (lengths.cumsum(0) - lengths)[runs]
        prefixes = Prefixes(
            counts,
            sharing.slots[ranges(begins, sharing.shared[runs])],
            longest=int((counts + torch.tensor(sizes)).max()),
        )
    totals = lengths[runs].tolist() + sizes[len(runs) :]
    layout = PackLayout.of_lengths(sizes, device, cp, prefixes, totals)
    return layout, own_slots(sizes, cp)


# --- the exchange between context-parallel ranks --------------------------------------------------


def gather_keys_values(key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Gather keys and values: [T, groups, d] each -> [CP * T, groups, d], concatenated by rank.

    The backward pass sums the gradients from all ranks' queries.
    """
    if group.size() == 1:
        return key, value
    both = gather_from_sequence_parallel_region(
        torch.cat((key, value), -1), tensor_parallel_output_grad=True, group=group
    )
    gathered: tuple[Tensor, Tensor] = both.split((key.size(-1), value.size(-1)), -1)
    return gathered


def gather_targets(output: Any, own: Tensor, total: int, group: ProcessGroup) -> Any:
    """Gather the head's results for all targets of the micro-batch, on every rank. Differentiable.

    Args:
        output: a tensor [m] of this rank's targets, or a tuple of such tensors and Nones.
        own: int64 [m], their indices among the `total` targets.
    """
    if group.size() == 1:
        return output
    if isinstance(output, Tensor):
        return _GatherTargets.apply(output[None], own, total, group)[0]
    rows = iter(
        _GatherTargets.apply(torch.stack([x for x in output if x is not None]), own, total, group)
    )
    return tuple(None if x is None else next(rows) for x in output)


def gather_predicted(part: Tensor, micro: MicroBatch, group: ProcessGroup) -> Tensor:
    """Gather [k] of this rank's targets of multi-token prediction -> [M]; 0 where there is none."""
    assert micro.next is not None
    total = micro.num_trainable
    if group.size() == 1:
        return part.new_zeros(total).index_copy(0, micro.next.own, part)
    whole: Tensor = gather_targets(part, micro.next.own, total, group)
    return whole


class _GatherTargets(torch.autograd.Function):
    """Gather [k, m] -> [k, M].

    The backward pass takes this rank's part without a sum: every rank has the whole loss, and
    Megatron's DDP adds the gradients of the context-parallel ranks.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, own: Tensor, total: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(own)
        whole = part.new_zeros(part.size(0), total)
        whole[:, own] = part
        if total:
            dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        return gradients[0].index_select(1, own), None, None, None
