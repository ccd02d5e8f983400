"""Self-attention with an output gate, and with more tensor-parallel ranks than KV heads.

With an output gate (Qwen3-Next, Qwen3.5) the rows of each query head are followed by those of its
gate, as in the Hugging Face folder. Megatron's own attention expects all gates of a KV head behind
its query heads.

Tensor-parallel ranks that share a KV head hold equal parts of its rows. Of a head of size d over n
ranks, a rank's QKV projection has

    its query heads | d / n rows of the key | d / n rows of the value

so no weight, gradient or optimizer state is held twice. The ranks gather keys and values before
attention, and each takes the head of its queries. In the backward pass the gather sums what all
queries of a head contribute to its gradient.

Megatron's own attention gathers the queries too. With many query heads for each KV head it sends
several times as much, and keeps all of it for the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


def divides_heads(config: TransformerConfig) -> bool:
    """Whether tensor-parallel ranks hold parts of KV heads."""
    assert config.num_query_groups is not None
    return config.num_query_groups < config.tensor_model_parallel_size


class GatedAttention(SelfAttention):
    """Self-attention whose heads are multiplied by their gates, if the model has gates."""

    def get_query_key_value_tensors(  # type: ignore[override]
        self, hidden_states: Tensor, *unused: Any, **unused_options: Any
    ) -> tuple[Tensor, ...]:
        """Return q [T, 1, heads, d], k and v [T, 1, groups, d], and the gates if there are any."""
        mixed: Tensor = self.linear_qkv(hidden_states)[0]
        head_dim = self.hidden_size_per_attention_head
        by_group = mixed.unflatten(-1, (self.num_query_groups_per_partition, -1))
        query, key, value = by_group.split(
            [by_group.size(-1) - 2 * head_dim, head_dim, head_dim], dim=-1
        )
        return self.of_heads(query.flatten(2), key, value)

    def of_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Split [T, 1, rows of all heads] into heads and gates, and apply the norms of heads."""
        head_dim = self.hidden_size_per_attention_head
        gates: list[Tensor] = []
        if self.config.attention_output_gate:
            query, *gates = query.unflatten(-1, (-1, 2 * head_dim)).chunk(2, dim=-1)
        else:
            query = query.unflatten(-1, (-1, head_dim))
        if self.q_layernorm is not None:
            query = self.q_layernorm(query)
        if self.k_layernorm is not None:
            key = self.k_layernorm(key)
        return query, key, value, *gates

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        # Megatron's function is compiled for each size of a pack.
        return x * gate.reshape(x.shape).sigmoid()


class DividedHeads(GatedAttention):
    """Self-attention whose KV heads are divided over ranks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups: int = self.config.num_query_groups  # type: ignore[assignment]
        self.ranks_of_head = self.tp_group.size() // groups
        # The KV head of this rank, and this rank's number among the ranks of that head.
        self.head, self.member = divmod(self.tp_group.rank(), self.ranks_of_head)
        self.query_rows = self.query_projection_size // self.tp_group.size()
        if self.config.attention_output_gate:
            self.query_rows *= 2
        self.head_rows = self.hidden_size_per_attention_head // self.ranks_of_head

    def get_query_key_value_tensors(  # type: ignore[override]
        self, hidden_states: Tensor, *unused: Any, **unused_options: Any
    ) -> tuple[Tensor, ...]:
        """Return q [T, 1, heads of this rank, d], k and v [T, 1, 1, d], and gates like q."""
        mixed: Tensor = self.linear_qkv(hidden_states)[0]
        query, own = mixed.split([self.query_rows, 2 * self.head_rows], dim=-1)
        # The gather is along the first dimension, and its backward pass sums over the ranks.
        gathered = gather_from_sequence_parallel_region(
            own, tensor_parallel_output_grad=True, group=self.tp_group
        )
        # [ranks, T, 1, k and v, rows]
        parts = gathered.view(-1, *own.shape[:-1], 2, self.head_rows)
        of_head = parts.narrow(0, self.head * self.ranks_of_head, self.ranks_of_head)
        # The copy frees the heads of the other ranks.
        key, value = of_head.permute(3, 1, 2, 0, 4).flatten(3).unsqueeze(3)
        return self.of_heads(query, key, value)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the state with each rank's rows at their places in the whole QKV projection.

        So a checkpoint is the same under every tensor-parallel size.
        """
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        for name in ("weight", "bias"):
            key = f"{prefix}linear_qkv.{name}"
            if key in state:
                state[key] = self._in_place(state[key])
        return state

    def _in_place(self, entry: ShardedTensor) -> ShardedTensorFactory:
        """The factory of the three parts of this rank's QKV weight or bias."""
        # Megatron's writer adds the axis of the layers to the shards of a regular grid alone. These
        # parts have unequal sizes, so they bring it.
        axis = entry.prepend_axis_num
        layer = entry.global_offset[:axis]
        rest = entry.global_offset[axis + 1 :]

        @torch.no_grad()
        def build(key: str, tensor: Tensor, replica_id: Any, *unused: Any) -> list[ShardedTensor]:
            sizes = [self.query_rows, self.head_rows, self.head_rows]
            parts = tensor.view((1,) * axis + tensor.shape).split(sizes, dim=axis)
            return [
                replace(
                    entry,
                    key=key,
                    data=part,
                    local_shape=tuple(part.shape),
                    global_offset=(*layer, start, *rest),
                    prepend_axis_num=0,
                    axis_fragmentations=None,
                    replica_id=replica_id,
                )
                for start, part in zip(self._starts(), parts, strict=True)
            ]

        def merge(parts: list[Tensor]) -> Tensor:
            return torch.cat(parts, dim=axis).view(entry.local_shape)

        return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id)

    def _starts(self) -> Iterator[int]:
        """The first rows of this rank's queries, key and value in the whole projection."""
        queries = self.ranks_of_head * self.query_rows
        head_dim = self.hidden_size_per_attention_head
        first = self.head * (queries + 2 * head_dim)
        yield first + self.member * self.query_rows
        yield first + queries + self.member * self.head_rows
        yield first + queries + head_dim + self.member * self.head_rows
