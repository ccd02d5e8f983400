"""Packed (`thd`) causal self-attention without Transformer Engine, its rotary positions, and an RMSNorm.

A pack is T tokens of several sequences, one behind the other. How it is cut is worked out once per pack (`PackLayout`)
and shared by all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from backends.megatron.elementwise import rotate

_SMALLEST_BUCKET = 16


@dataclass(frozen=True)
class PackLayout:
    """Where the sequences of one pack stand.

    Buckets hold sequences of similar length, padded on the right to the longest: a causal query never sees a key behind it,
    so no mask is needed. `restore` undoes the buckets: token t is row `restore[t]` of their concatenation.
    """

    lengths: tuple[int, ...]            # of every sequence of the pack, none of them 0
    positions: Tensor                   # int64 [T], inside the own sequence
    cu_seqlens: Tensor                  # int32 [n+1]
    buckets: tuple[Tensor, ...]         # int64 [b, longest] each: pack positions; a pad repeats the last token
    restore: Tensor                     # int64 [T]
    identity: bool                      # one bucket without pads: gathering would change nothing

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @classmethod
    def of_lengths(cls, lengths: Sequence[int], device: torch.device) -> PackLayout:
        """Build on the CPU, hand over on `device`."""
        kept = [n for n in lengths if n]
        sizes = torch.tensor(kept, dtype=torch.int64)
        cu = torch.zeros(len(kept) + 1, dtype=torch.int64)
        torch.cumsum(sizes, 0, out=cu[1:])
        total = int(cu[-1])
        positions = torch.arange(total) - torch.repeat_interleave(cu[:-1], sizes, output_size=total)
        restore = torch.empty(total, dtype=torch.int64)
        buckets: list[Tensor] = []
        filled = 0
        for members in _bucket_members(kept):
            rows = torch.tensor(members, dtype=torch.int64)
            longest = int(sizes[rows].max())
            column = torch.arange(longest)
            inside = torch.minimum(column[None, :], sizes[rows, None] - 1)
            real = column[None, :] < sizes[rows, None]
            index = cu[rows, None] + inside
            restore[index[real]] = filled + torch.arange(index.numel()).view_as(index)[real]
            filled += index.numel()
            buckets.append(index)
        identity = len(buckets) == 1 and filled == total and bool((restore == torch.arange(total)).all())
        return cls(
            lengths=tuple(kept),
            positions=positions.to(device),
            cu_seqlens=cu.int().to(device),
            buckets=tuple(b.to(device) for b in buckets),
            restore=restore.to(device),
            identity=identity,
        )


def _bucket_members(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences whose lengths round up to the same of 16, 24, 32, 48, 64, ...: at most a third of a bucket is padding."""
    members: dict[int, list[int]] = {}
    for i, n in enumerate(lengths):
        ceiling = _SMALLEST_BUCKET
        while ceiling < n:
            ceiling = ceiling * 3 // 2 if ceiling & (ceiling - 1) == 0 else ceiling * 4 // 3
        members.setdefault(ceiling, []).append(i)
    return [members[ceiling] for ceiling in sorted(members)]


@dataclass
class PackedSequences(PackedSeqParams):
    """What Megatron carries through the layers as `packed_seq_params`.

    The rotary angles travel here too and `PackedAttention` applies them: Megatron would cut the pack sequence by sequence in
    Python to rotate q and k, in every layer.
    """

    layout: PackLayout | None = None
    cos: Tensor | None = None           # [T, 1, d/2], of the angle of each token at its position
    sin: Tensor | None = None

    @classmethod
    def of(cls, layout: PackLayout) -> PackedSequences:
        return cls(qkv_format="thd", max_seqlen_q=layout.longest, max_seqlen_kv=layout.longest, layout=layout)


class PackedRotaryEmbedding(RotaryEmbedding):
    """Rotary angles of a pack, each token at its position inside its sequence, left in the `PackedSequences`.

    GPTModel asks for a length and hands it to `forward`; the slot carries the packed sequences instead.
    """

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> Any:
        packed = kwargs.get("packed_seq_params", args[-1] if args else None)
        if not isinstance(packed, PackedSequences):
            raise TypeError(f"the model takes packed sequences only, got packed_seq_params={packed!r}")
        return packed

    def forward(self, packed: PackedSequences, *args: Any, **kwargs: Any) -> None:     # type: ignore[override]
        assert packed.layout is not None
        emb: Tensor = self.get_emb(packed.layout.longest)       # [longest, 1, 1, d], its halves equal
        angles = emb[..., : emb.size(-1) // 2]
        packed.cos, packed.sin = (part[packed.layout.positions, 0] for part in (angles.cos(), angles.sin()))


class PackedAttention(MegatronModule):
    """Core attention over a pack: q [T, heads, d], k and v [T, groups, d] to [T, heads * d].

    On CUDA in half precision one variable-length kernel; else a few batched, right-padded calls.
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: Any, attention_dropout: float | None = None,
        softmax_scale: float | None = None, cp_comm_type: str | None = None, pg_collection: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, attn_mask_type: Any = None,
        attention_bias: Tensor | None = None, packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:  # fmt: skip
        if packed_seq_params is None or packed_seq_params.layout is None:
            raise TypeError("PackedAttention takes packed sequences only")
        layout = packed_seq_params.layout
        assert packed_seq_params.cos is not None
        assert packed_seq_params.sin is not None
        query, key = (rotate(x, packed_seq_params.cos, packed_seq_params.sin) for x in (query, key))
        if uses_varlen(query.device, query.dtype):
            out = _varlen_attention()(
                query, key, value, layout.cu_seqlens, layout.cu_seqlens, layout.longest, layout.longest,
                scale=self.scale, window_size=(-1, 0), enable_gqa=query.size(1) != key.size(1),
            )  # fmt: skip
            return cast(Tensor, out).reshape(query.size(0), -1)
        return bucketed_attention(query, key, value, layout, self.scale)


def uses_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length flash attention serves this device and dtype."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and _varlen_attention() is not None


@cache
def _varlen_attention() -> Any:
    """torch's kernel, or None before torch 2.10. Its import brings the compiler along, so only CUDA pays for it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def bucketed_attention(query: Tensor, key: Tensor, value: Tensor, layout: PackLayout, scale: float) -> Tensor:
    """Causal attention inside each sequence of a pack, one batched call per bucket: [T, heads * d]."""
    heads, groups = query.size(1), key.size(1)
    outputs: list[Tensor] = []
    for index in layout.buckets:
        rows, longest = index.shape
        q, k, v = (
            (x if layout.identity else x.index_select(0, index.view(-1))).reshape(rows, longest, x.size(1), x.size(2))
            for x in (query, key, value)
        )
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale, enable_gqa=heads != groups
        )
        outputs.append(out.transpose(1, 2).reshape(rows * longest, -1))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat if layout.identity else flat.index_select(0, layout.restore)


class LocalRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm; under sequence parallelism its weight is marked, so that its gradient is summed over TP."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
