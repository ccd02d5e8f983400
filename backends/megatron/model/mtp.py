"""Multi-token prediction: a layer behind the last one predicts the token after the next.

From the hidden state h of a token and the embedding e of the next one, as DeepSeek-AI 2024 (section
2.2, arXiv:2412.19437) with one layer,

    x = projection(concat(norm(e), norm(h))),   h' = norm(layer(x)),

and the model's own head gives the distribution of the token after the next. Hidden states,
embedding and head are detached: its loss changes the layer alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from backends.megatron.model.head import Targets
from backends.megatron.model.layer_specs import norm_class


@dataclass(frozen=True)
class Prediction:
    """How the module for multi-token prediction is built."""

    layer: ModuleSpec
    hidden_first: bool  # in the input of the projection


class MultiTokenPrediction(MegatronModule):
    """Norms, projection and decoder layer. The projection is replicated over TP."""

    def __init__(
        self,
        config: TransformerConfig,
        prediction: Prediction,
        *,
        vp_stage: int | None,
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config=config)
        self.hidden_first = prediction.hidden_first
        self.tp_group = groups.tp
        norm = norm_class(config)
        size = config.hidden_size
        eps = config.layernorm_epsilon
        self.enorm = norm(config=config, hidden_size=size, eps=eps)
        self.hnorm = norm(config=config, hidden_size=size, eps=eps)
        self.eh_proj = nn.Linear(
            2 * size,
            size,
            bias=False,
            device=torch.cuda.current_device(),
            dtype=config.params_dtype,
        )
        nn.init.zeros_(self.eh_proj.weight)
        # Under SP each rank has the gradient of its tokens, which the mark makes Megatron sum.
        self.eh_proj.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        # Megatron adds the number of layers before this stage.
        before = get_transformer_layer_offset(config, vp_stage=vp_stage)
        self.layer = build_module(
            prediction.layer,
            config=config,
            layer_number=config.num_layers + 1 - before,
            vp_stage=vp_stage,
            pg_collection=groups,
        )
        self.final_layernorm = norm(config=config, hidden_size=size, eps=eps)
        for parameter in self.parameters():
            # Megatron leaves it out of the gradient norm, so that clipping the trunk's gradient
            # does not depend on it.
            parameter.shared = True  # type: ignore[attr-defined]

    def forward(
        self, hidden: Tensor, targets: Targets, embedding: Tensor
    ) -> tuple[Tensor, Targets]:
        """Return the states before the head, and the targets that they predict.

        Args:
            hidden: [T, 1, H] behind the final norm, or its sequence-parallel share; so is the
                result.
            embedding: [V/tp, H].
        """
        micro = targets.micro
        assert micro.next is not None, "the pack was made without `mtp`"
        embedded = self.enorm(self._own_share(_embed(micro.next.ids, embedding, self.tp_group)))
        states = self.hnorm(hidden.detach())
        pair = (states, embedded) if self.hidden_first else (embedded, states)
        padding = None
        if self.config.num_moe_experts is not None:
            padding = self._own_share(micro.padding.transpose(0, 1)).transpose(0, 1)
        states, _ = self.layer(
            hidden_states=self.eh_proj(torch.cat(pair, dim=-1)),
            attention_mask=None,
            packed_seq_params=micro.packed,
            padding_mask=padding,
        )
        own = replace(
            micro,
            target_index=micro.next.index,
            target_tokens=micro.next.tokens,
            sampling_mask=None,
        )
        options = replace(targets.options, entropy=False)
        return self.final_layernorm(states), Targets(own, options)

    def _own_share(self, slots: Tensor) -> Tensor:
        """The part of [T, ...] that this rank has under SP."""
        if not self.config.sequence_parallel:
            return slots
        return slots.chunk(self.tp_group.size())[self.tp_group.rank()].contiguous()


@torch.no_grad()
def _embed(ids: Tensor, weight: Tensor, tp: ProcessGroup) -> Tensor:
    """The embeddings [T, 1, H] of int64 [1, T], from this rank's rows of the vocabulary."""
    rows = ids[0] - tp.rank() * weight.size(0)
    here = (rows >= 0) & (rows < weight.size(0))
    found = F.embedding(rows.clamp(0, weight.size(0) - 1), weight)
    found = found.masked_fill(~here[:, None], 0.0)
    if tp.size() > 1:
        dist.all_reduce(found, group=tp)
    return found[:, None]


@contextmanager
def prediction_pass(chunks: list[GPTModel]) -> Iterator[None]:
    """Inside, a last stage without an embedding has the first stage's. Collective."""
    _send_embedding(chunks)
    try:
        yield
    finally:
        chunks[-1].received_embedding = None  # type: ignore[assignment]


def _send_embedding(chunks: list[GPTModel]) -> None:
    first: Any = chunks[0]
    last: Any = chunks[-1]
    if first.share_embeddings_and_output_weights or (first.pre_process and last.post_process):
        return
    if not (first.pre_process or last.post_process):
        return
    group = mpu.get_embedding_group()
    if first.pre_process:
        weight = first.embedding.word_embeddings.weight.detach()
    else:
        weight = torch.empty_like(last.output_layer.weight)
        last.received_embedding = weight
    dist.broadcast(weight, dist.get_process_group_ranks(group)[0], group=group)
