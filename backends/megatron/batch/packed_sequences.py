"""The packed sequences of a micro-batch, as Megatron carries them through the layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from backends.megatron.batch.cp_layout import PackLayout


@dataclass
class PackedSequences(PackedSeqParams):
    """What Megatron carries through the layers as `packed_seq_params`.

    The rotary angles travel here too and `PackedAttention` applies them: Megatron would cut the
        pack sequence by sequence in
    Python to rotate q and k, in every layer.
    """

    layout: PackLayout | None = None
    cos: Tensor | None = None  # [T, 1, d/2], of the angle of each token at its position
    sin: Tensor | None = None

    @classmethod
    def of(cls, layout: PackLayout) -> PackedSequences:
        return cls(
            qkv_format="thd",
            max_seqlen_q=layout.longest,
            max_seqlen_kv=layout.longest,
            layout=layout,
        )
