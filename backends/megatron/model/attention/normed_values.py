"""Self-attention of Gemma 4, whose values pass a norm without weights.

In layers without a window there is no projection of values: the keys before their norm are the
values too. These layers have heads of another size, and another number of KV heads.
"""

from __future__ import annotations

import copy
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from backends.megatron.model.attention.divided_heads import GatedAttention


class NormedValues(GatedAttention):
    """Self-attention whose values pass a norm.

    Args:
        full_heads: (KV heads, head size) of a layer whose keys are its values; None: the
            configuration's, with a projection of values.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any,
        *args: Any,
        full_heads: tuple[int, int] | None,
        **kwargs: Any,
    ) -> None:
        if full_heads is not None:
            config = copy.copy(config)
            config.num_query_groups, config.kv_channels = full_heads
        super().__init__(config, submodules, *args, **kwargs)
        self.keys_are_values = full_heads is not None
        if self.keys_are_values:
            self.linear_qkv_out_dim = self.query_projection_size + self.kv_projection_size
            self.linear_qkv = submodules.linear_qkv(
                config.hidden_size,
                self.linear_qkv_out_dim,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name="qkv",
                tp_group=self.pg_collection.tp,
            )

    def get_query_key_value_tensors(  # type: ignore[override]
        self, hidden_states: Tensor, *unused: Any, **unused_options: Any
    ) -> tuple[Tensor, ...]:
        """Return q [T, 1, heads, d], k and v [T, 1, groups, d]."""
        mixed: Tensor = self.linear_qkv(hidden_states)[0]
        by_group = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        size = self.hidden_size_per_attention_head
        sizes = [size] if self.keys_are_values else [size, size]
        query, key, *value = by_group.split([by_group.size(-1) - sum(sizes), *sizes], dim=-1)
        normed = F.rms_norm((value or [key])[0], (size,), None, self.config.layernorm_epsilon)
        return self.of_heads(query.flatten(2), key, normed)
