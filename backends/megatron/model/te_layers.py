"""Megatron's Transformer Engine layers over packs. Imported only where they were chosen."""

from __future__ import annotations

import copy
from typing import Any

from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from backends.megatron.batch.pack import PackedSequences
from backends.megatron.model.elementwise import rotate
from backends.megatron.model.moe import router_class
from rlcore.errors import ConfigError

FINAL_NORM = TENorm


class TEAttention(MegatronModule):
    """Transformer Engine's core attention over a pack.

    It rotates q and k as `PackedAttention` does. Under context parallelism Transformer Engine
    exchanges keys and values itself. It takes the sequences in our layout: padded to a multiple of
    2 * CP, each rank with an early and a late chunk.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.attention = TEDotProductAttention(config, *args, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:
        """q [T, heads, d], k and v [T, groups, d] -> [T, heads * d]."""
        if (
            packed_seq_params is None
            or packed_seq_params.cos is None
            or packed_seq_params.sin is None
        ):
            raise TypeError("TEAttention takes packed sequences only")
        query, key = (rotate(x, packed_seq_params.cos, packed_seq_params.sin) for x in (query, key))
        out: Tensor = self.attention(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type,
            attention_bias,
            te_params(packed_seq_params),
        )
        return out.reshape(query.size(0), -1)


def te_params(packed: PackedSequences) -> PackedSeqParams:
    """The parameters of a pack for Transformer Engine: lengths of sequences over all CP ranks."""
    assert packed.layout is not None
    cu = packed.layout.cu_seqlens
    longest = packed.layout.longest
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def te_layer_spec(config: TransformerConfig, num_experts: int | None) -> ModuleSpec:
    """The specification of one Transformer Engine layer.

    With experts it has grouped matmuls, and the router that leaves pads out. Raises ConfigError
    where Transformer Engine is installed and cannot be imported.
    """
    if not HAVE_TE:
        raise ConfigError(
            "transformer_engine is installed and Megatron cannot import it (`import"
            " transformer_engine.pytorch` has the reason); repair it, or set"
            " policy.transformer_engine: off"
        )
    layer = copy.deepcopy(
        get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts,
            moe_grouped_gemm=num_experts is not None,
            qk_layernorm=config.qk_layernorm,
        )
    )
    layer.submodules.self_attention.submodules.core_attention = TEAttention
    if num_experts is not None:
        layer.submodules.mlp.submodules.router = router_class(config)
    return layer
