"""From a rank's share of a batch to the packed tensors of its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.megatron.attention import PackedSequences, PackLayout
from rlcore.data.batch import RolloutBatch


@dataclass(frozen=True)
class MicroBatch:
    """One pack of T slots: consecutive sequences of a batch, B of them, with M trainable tokens; pads stand at the end.

    A target is shifted here, before anything splits the pack: the token at slot t is predicted from slot t - 1.
    """

    input_ids: Tensor           # int64 [1, T]
    packed: PackedSequences
    target_index: Tensor        # int64 [M]: the slot before each trainable token
    target_tokens: Tensor       # int64 [M]
    cu_seqlens: Tensor          # int64 [B+1], over trainable tokens
    rows: slice                 # of the batch's compact vectors
    sequences: slice            # of its vectors with one value a sequence
    num_tokens: int             # model tokens without pads

    @property
    def num_slots(self) -> int:
        return self.input_ids.size(1)


def pad_lengths(missing: int, longest: int) -> list[int]:
    """Lengths of the pad sequences that fill `missing` slots.

    None is longer than the longest real sequence (or 16), so that attention over pads never dominates.
    """
    piece = max(longest, 16)
    return [piece] * (missing // piece) + ([missing % piece] if missing % piece else [])


def pack_size(num_tokens: int, multiple: int) -> int:
    """Slots of a pack: at least one multiple, so that a micro-batch without tokens still runs."""
    return max(-(-num_tokens // multiple), 1) * multiple


def make_micro_batch(batch: RolloutBatch, first: int, last: int, num_slots: int, device: torch.device) -> MicroBatch:
    """Pack the sequences [first, last) of `batch`, which may be empty or none, into `num_slots` slots on `device`."""
    model = slice(int(batch.cu_tokens[first]), int(batch.cu_tokens[last]))
    rows = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[last]))
    num_tokens = model.stop - model.start
    input_ids = torch.zeros(1, num_slots, dtype=torch.int64)
    input_ids[0, :num_tokens] = batch.tokens[model]
    trainable = batch.loss_mask[model].nonzero()[:, 0]
    lengths = batch.lengths[first:last].tolist()
    pads = pad_lengths(num_slots - num_tokens, max(lengths, default=0))
    return MicroBatch(
        input_ids=input_ids.to(device),
        packed=PackedSequences.of(PackLayout.of_lengths(lengths + pads, device)),
        target_index=(trainable - 1).to(device),
        target_tokens=input_ids[0, trainable].to(device),
        cu_seqlens=(batch.cu_seqlens[first : last + 1] - batch.cu_seqlens[first]).to(device),
        rows=rows,
        sequences=slice(first, last),
        num_tokens=num_tokens,
    )
