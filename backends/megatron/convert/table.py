"""The words of the conversion tables: which Hugging Face tensors make a Megatron parameter, and how TP splits it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

# Transformer Engine's layer spec fuses two norms into the linear layer behind them.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}

VALUE_HEAD = "value_head.weight"            # [1, hidden], replicated over TP; Hugging Face's `score.weight`
WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


class Split(Enum):
    """How a full tensor is cut over the tensor-parallel ranks."""

    REPLICATED = "replicated"               # every rank holds all of it
    COLUMN = "column"                       # dim 0, contiguous
    ROW = "row"                             # dim 1, contiguous
    VOCAB = "vocab"                         # dim 0 of the padded vocabulary
    QKV = "qkv"                             # q, k, v: interleaved per KV group; groups are cut over the ranks
    GATED = "gated"                         # gate, up: each cut along dim 0, then stacked on every rank


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors it is made of. `{layer}` is the global layer number."""

    megatron: str
    hf: tuple[str, ...]
    split: Split

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.megatron

    def at(self, layer: int) -> Entry:
        """The entry of one layer, names filled in."""
        return Entry(self.megatron.format(layer=layer), tuple(n.format(layer=layer) for n in self.hf), self.split)


@dataclass(frozen=True)
class Family:
    """A model family: its table, and what its `config.json` leaves unsaid."""

    model_type: str                         # `model_type` in config.json
    class_prefix: str                       # `<prefix>ForCausalLM`, `<prefix>ForSequenceClassification`
    entries: tuple[Entry, ...]              # in the order of a forward pass
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None             # default where config.json has none; None: hidden_size / heads

    @property
    def classes(self) -> tuple[str, str]:
        """(language model, sequence classifier): the values of `architectures` that we convert."""
        return f"{self.class_prefix}ForCausalLM", f"{self.class_prefix}ForSequenceClassification"

    def expand(self, num_layers: int) -> Iterator[Entry]:
        """Every entry of a model of `num_layers` layers, embedding first, head last."""
        before = [e for e in self.entries if not e.per_layer and e.megatron.startswith("embedding.")]
        layer = [e for e in self.entries if e.per_layer]
        after = [e for e in self.entries if not e.per_layer and e not in before]
        yield from before
        for number in range(num_layers):
            yield from (entry.at(number) for entry in layer)
        yield from after
