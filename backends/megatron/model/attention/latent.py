"""Multi-head latent attention (DeepSeek-V2, 2024) over packs.

The projections are Megatron's; the rotation and the core attention are ours. The path of Megatron's
`MLASelfAttention` from hidden states to q, k and v is replaced: in every layer it splits a pack
sequence by sequence in Python, and it leaves each tensor-parallel rank with only a part of the
shared key's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from torch import Tensor

from backends.megatron.batch.pack import PackedSequences
from backends.megatron.batch.rotary import Angles
from backends.megatron.convert.rope import Rope
from backends.megatron.cpu.shim import replaced
from backends.megatron.model.attention.core import LocalRMSNorm
from backends.megatron.model.elementwise import rotate_heads


class LatentRMSNorm(LocalRMSNorm):
    """The norm of a low-rank form.

    Its epsilon is the constant of transformers and of DeepSeek's code; `config.json` is ignored.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **unused: Any) -> None:
        super().__init__(config, hidden_size, eps=1e-6)


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """Megatron's layer over T slots, of which a rank holds T / TP under sequence parallelism.

    Args:
        rope: the rotary positions of the layer.
    """

    def __init__(self, *args: Any, rope: Rope, **kwargs: Any) -> None:
        # Without Transformer Engine Megatron's classes for it are stubs that `isinstance` rejects.
        has_te = multi_latent_attention.HAVE_TE and transformer_engine.HAVE_TE
        with replaced(multi_latent_attention, "HAVE_TE", has_te):
            super().__init__(*args, **kwargs)
        self.rope = rope

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: PackedSequences | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Compute q and k [T, heads, d_qk], rotated, v [T, heads, d_v], and both low-rank forms.

        `hidden_states` is [T, 1, hidden].
        """
        assert packed_seq_params is not None
        low_query = hidden_states[:, 0]
        if self.config.q_lora_rank is not None:
            low_query = self.q_layernorm(
                self._over_slots(self._whole(self.linear_q_down_proj, hidden_states))
            )
        both = self._whole(self.linear_kv_down_proj, hidden_states)
        latent, shared_key = both.split(
            (self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim), -1
        )
        latent = self.kv_layernorm(self._over_slots(latent))
        # Each tensor-parallel rank makes its own heads of the shared key, so the gradients of all
        # ranks are summed.
        shared_key = copy_to_tensor_model_parallel_region(shared_key)
        angles = packed_seq_params.angles[self.rope]
        query, key, value = self._heads(low_query, latent, shared_key, angles)
        return query, key, value, low_query, latent

    def _whole(self, projection: Any, hidden_states: Tensor) -> Tensor:
        """The gathered output of a projection that tensor parallelism splits: [T, width]."""
        part: Tensor = projection(hidden_states)[0]
        whole: Tensor = gather_from_tensor_model_parallel_region(part)
        return whole[:, 0]

    def _over_slots(self, low: Tensor) -> Tensor:
        """The input of the projection to the heads; under SP only this rank's slots."""
        return scatter_to_sequence_parallel_region(low) if self.config.sequence_parallel else low

    def _heads(
        self, low_query: Tensor, latent: Tensor, shared_key: Tensor, angles: Angles
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads = self.num_attention_heads_per_partition
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query, rotary_query = _split_heads(
            project(low_query)[0], heads, config.qk_head_dim, config.qk_pos_emb_head_dim
        )
        key, value = _split_heads(
            self.linear_kv_up_proj(latent)[0], heads, config.qk_head_dim, config.v_head_dim
        )
        rotary_query, rotary_key = rotate_heads(rotary_query, shared_key[:, None], angles)
        rotary_key = rotary_key.expand(-1, heads, -1)
        return (
            torch.cat((query, rotary_query), -1),
            torch.cat((key, rotary_key), -1),
            value.contiguous(),
        )


def _split_heads(x: Tensor, heads: int, first: int, second: int) -> tuple[Tensor, Tensor]:
    """Split [T, heads * (first + second)] into [T, heads, first] and [T, heads, second]."""
    one, other = x.view(x.size(0), heads, first + second).split((first, second), -1)
    return one, other
