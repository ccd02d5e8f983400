"""The vocabulary of the conversion tables.

A row names the Hugging Face tensors that make a Megatron parameter, and how TP splits it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

from rlcore.hf_config.fields import Field

# Transformer Engine's layer spec fuses two norms into the following linear layers.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
# Transformer Engine's grouped matmuls hold a rank's experts as numbered weights of one module.
_GROUPED_EXPERT = re.compile(r"^mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")

# [1, hidden], replicated over TP; Hugging Face's `score.weight`.
VALUE_HEAD = "value_head.weight"
WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


def local_spelling(name: str) -> str:
    """The name of a layer's parameter in the local layer spec, from its name in either spec.

    The tables use this spelling, so loading and exporting need no other:
    `linear_qkv.layer_norm_weight` becomes `input_layernorm.weight`, and
    `experts.linear_fc1.weight3` becomes `experts.local_experts.3.linear_fc1.weight`.
    """
    if grouped := _GROUPED_EXPERT.match(name):
        return f"mlp.experts.local_experts.{grouped[3]}.{grouped[1]}.{grouped[2]}"
    return FUSED_NORMS.get(name, name)


class Split(Enum):
    """How a full tensor is split over the tensor-parallel ranks."""

    REPLICATED = "replicated"  # every rank holds all of it
    COLUMN = "column"  # dim 0, contiguous
    ROW = "row"  # dim 1, contiguous
    VOCAB = "vocab"  # dim 0 of the padded vocabulary
    # q, k, v: interleaved per KV group; groups are split over the ranks.
    QKV = "qkv"
    # gate, up: each split along dim 0, then stacked on every rank.
    GATED = "gated"


# The layers with an entry: all, only layers with one feed-forward net, or only those with experts.
Layers = Literal["all", "dense", "moe"]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    `{layer}` is the layer's and `{expert}` the routed expert's number in the whole model.
    """

    megatron: str
    hf: tuple[str, ...]
    split: Split
    layers: Layers = "all"
    # The routed expert of the entry once names are filled in; None: a dense weight.
    expert: int | None = None
    # A TransformerConfig field: only models with it have the entry.
    where: str | None = None
    unless: str | None = None  # a field: only models without it have the entry
    dtype: str | None = None  # fixed dtype, whatever the model's

    @property
    def per_layer(self) -> bool:
        """Whether the entry stands for a parameter of each layer."""
        return "{layer}" in self.megatron

    @property
    def per_expert(self) -> bool:
        """Whether the entry stands for a parameter of each routed expert."""
        return "{expert}" in self.megatron

    def at(self, layer: int, expert: int | None = None) -> Entry:
        """The entry of one layer (and expert), with names filled in."""
        megatron, *hf = (
            name.format(layer=layer, expert=expert) for name in (self.megatron, *self.hf)
        )
        return replace(self, megatron=megatron, hf=tuple(hf), expert=expert)

    def is_in(self, fields: Mapping[str, Any]) -> bool:
        """Whether a model with these TransformerConfig fields has the entry."""
        return (self.where is None or bool(fields.get(self.where))) and (
            self.unless is None or not fields.get(self.unless)
        )


@dataclass(frozen=True)
class Experts:
    """How a family's `config.json` describes its experts, and facts that it leaves out."""

    # Keys of the number of experts; some are aliases in transformers.
    count: tuple[str, ...]
    width: str  # key: feed-forward width of a routed expert
    # Whether the chosen experts' probabilities add up to 1, or the key of this setting.
    normalized: str | bool
    # Key: width of the gated expert that every token passes through.
    shared_width: str | None = None
    # Key: number of ungated experts of `width` that every token passes through.
    shared_count: str | None = None
    # sigmoid: experts are chosen with a bias, in groups, and their weights are scaled.
    scoring: Literal["softmax", "sigmoid"] = "softmax"


@dataclass(frozen=True)
class Family:
    """A model family: its table, and facts that its `config.json` leaves out."""

    model_type: str  # `model_type` in config.json
    # `<prefix>ForCausalLM`, `<prefix>ForSequenceClassification`.
    class_prefix: str
    entries: tuple[Entry, ...]  # in the order of a forward pass
    fields: Mapping[str, Field]  # of `config.json`
    qkv_bias: bool = False
    qk_norm: bool = False
    # Keys and values come from a shared low-rank form (DeepSeek-V2).
    latent_attention: bool = False
    experts: Experts | None = None  # a mixture of experts

    @property
    def classes(self) -> tuple[str, str]:
        """(language model, sequence classifier): the values of `architectures` that we convert."""
        return f"{self.class_prefix}ForCausalLM", f"{self.class_prefix}ForSequenceClassification"

    def expand(self, moe_layers: Sequence[bool], num_experts: int) -> Iterator[Entry]:
        """Yield every entry of a model, embedding first, head last.

        `moe_layers` states for each layer whether it has experts.
        """
        before = [
            e for e in self.entries if not e.per_layer and e.megatron.startswith("embedding.")
        ]
        layer = [e for e in self.entries if e.per_layer]
        after = [e for e in self.entries if not e.per_layer and e not in before]
        yield from before
        for number, moe in enumerate(moe_layers):
            for entry in layer:
                if entry.layers in ("all", "moe" if moe else "dense"):
                    yield from (
                        entry.at(number, expert)
                        for expert in (range(num_experts) if entry.per_expert else (None,))
                    )
        yield from after
