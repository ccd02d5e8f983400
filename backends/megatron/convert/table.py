"""The vocabulary of the conversion tables.

A row names the Hugging Face tensors that make a Megatron parameter, and how TP splits it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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

# Words of `layer_types`.
FULL_ATTENTION = "full_attention"
LINEAR_ATTENTION = "linear_attention"
SLIDING_ATTENTION = "sliding_attention"

# [1, hidden], replicated over TP; Hugging Face's `score.weight`.
VALUE_HEAD = "value_head.weight"
WORD_EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
# The decoder layer of multi-token prediction, below the module with its norms and projection.
MTP = "prediction."
MTP_LAYER = f"{MTP}layer."


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
    # q, k, v, for example: interleaved per KV group; groups are split over the ranks.
    QKV = "qkv"
    # gate and up, for example: each split along dim 0, then stacked on every rank.
    STACKED = "stacked"


@dataclass(frozen=True)
class Part:
    """One matrix or vector of a model: a whole Hugging Face tensor, or some of its rows.

    Sizes are named: see `Architecture.sizes`. The rank of an adapter is a number.
    """

    name: str
    shape: tuple[str | int, ...]
    # The parts that come before it in the tensor: their numbers of rows.
    after: tuple[str, ...] = ()
    # Every so many rows of the tensor belong to the part, from row `phase` on.
    step: int = 1
    phase: int = 0
    # The tensor holds the part's transpose.
    transposed: bool = False
    # The tensor holds the parts of all routed experts, along a first dimension.
    of_experts: bool = False

    def sizes(self, known: Mapping[str, int]) -> tuple[int, ...]:
        """The shape in numbers."""
        return tuple(size if isinstance(size, int) else known[size] for size in self.shape)

    def first_row(self, known: Mapping[str, int]) -> int:
        """Its first row in the tensor."""
        return self.phase + sum(known[size] for size in self.after)


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the parts of Hugging Face tensors that it is made of.

    All parts of a tensor belong to one entry, or to the same entry of all experts. `{layer}` is the
    layer's and `{expert}` the routed expert's number in the whole model.
    """

    megatron: str
    parts: tuple[Part, ...]
    split: Split
    # The kind of layers with the entry: "dense" or "moe", a word of `layer_types`, or "all".
    layers: str = "all"
    # The routed expert of the entry once names are filled in; None: a dense weight.
    expert: int | None = None
    # A TransformerConfig field: only models with it have the entry.
    where: str | None = None
    unless: str | None = None  # a field: only models without it have the entry
    # The rows of the second part in a group of a QKV split.
    group: str = "head"
    dtype: str | None = None  # fixed dtype, whatever the model's

    @property
    def per_layer(self) -> bool:
        """Whether the entry stands for a parameter of each layer."""
        return "{layer}" in self.megatron

    @property
    def per_expert(self) -> bool:
        """Whether the entry stands for a parameter of each routed expert."""
        return "{expert}" in self.megatron

    @property
    def names(self) -> tuple[str, ...]:
        """The Hugging Face tensors, each once."""
        return tuple(dict.fromkeys(part.name for part in self.parts))

    def at(self, layer: int, expert: int | None = None) -> Entry:
        """The entry of one layer (and expert), with names filled in."""
        named = self.renamed(lambda name: name.format(layer=layer, expert=expert))
        megatron = self.megatron.format(layer=layer, expert=expert)
        return replace(named, megatron=megatron, expert=expert)

    def renamed(self, rename: Callable[[str], str]) -> Entry:
        """The entry with other names of its Hugging Face tensors."""
        return replace(
            self, parts=tuple(replace(part, name=rename(part.name)) for part in self.parts)
        )

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
    # Key: width of the expert that every token passes through.
    shared_width: str | None = None
    # Whether that expert is gated.
    shared_gate: bool = True
    # Key: number of ungated experts of `width` that every token passes through.
    shared_count: str | None = None
    # sigmoid: experts are chosen with a bias, in groups, and their weights are scaled.
    scoring: Literal["softmax", "sigmoid"] = "softmax"


@dataclass(frozen=True)
class Recurrence:
    """What carries the state in recurrent layers, and the package with kernels for it."""

    name: str
    library: Literal["fla", "mamba_ssm"]  # the package's module
    package: str
    divided: str  # what tensor- and context-parallel ranks share


GATED_DELTA = Recurrence(
    "gated delta rule", "fla", "flash-linear-attention", "key heads of the gated delta rule"
)
MAMBA_2 = Recurrence("Mamba-2", "mamba_ssm", "mamba-ssm", "groups of Mamba-2")


@dataclass(frozen=True)
class PredictionLayer:
    """The tensors of the layer that predicts one token more (DeepSeek-AI 2024, section 2.2).

    Below `prefix` are also those of a decoder layer like the model's last one.
    """

    # `{layer}` is the number behind the last layer.
    prefix: str = "model.layers.{layer}."
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    final_norm: str = "shared_head.norm"
    # Whether the hidden state comes before the embedding in the projection's input.
    hidden_first: bool = False

    def entries(self, layer: int) -> Iterator[Entry]:
        """Yield the rows of the norms and the projection."""
        below = self.prefix.format(layer=layer)
        for megatron, name, shape in (
            ("enorm", self.embedding_norm, ("hidden",)),
            ("hnorm", self.hidden_norm, ("hidden",)),
            ("eh_proj", self.projection, ("hidden", "hidden_and_embedding")),
            ("final_layernorm", self.final_norm, ("hidden",)),
        ):
            part = Part(f"{below}{name}.weight", shape)
            yield Entry(f"{MTP}{megatron}.weight", (part,), Split.REPLICATED)


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
    # Whether Q and K each have one norm over all heads. Not with `qk_norm`: Megatron sums the
    # gradients of those norms over tensor-parallel ranks.
    norm_over_heads: bool = False
    # Layers of the type `sliding_attention` see a window of keys: all but every so many layers,
    # where `config.json` gives no types. 0: the family has none.
    windows: int = 0
    # Each head has a learned score beside those of the keys.
    sinks: bool = False
    # Norms scale by 1 + weight.
    zero_centred_norms: bool = False
    # The inputs of attention and MLP pass norms; so do their outputs.
    norms_before: bool = True
    norms_behind: bool = False
    # Values pass a norm without weights. In layers without a window the keys before their norm are
    # the values too, and heads have sizes of their own.
    normed_values: bool = False
    # The output of each layer is multiplied by a number, which is not trained.
    scaled_layers: bool = False
    # The embeddings are multiplied by the square root of the hidden size.
    scaled_embeddings: bool = False
    # "relu2": of feed-forward nets without a gate.
    activation: Literal["silu", "gelu_tanh", "relu2"] = "silu"
    # Keys and values come from a shared low-rank form (DeepSeek-V2).
    latent_attention: bool = False
    experts: Experts | None = None  # a mixture of experts
    # The beginning of the tensors' names in the table, and in folders of the family.
    prefix: tuple[str, str] = ("", "")
    # Patterns of the beginnings of names, as folders have them: of tensors that are neither trained
    # nor published, and that an export copies from the model's folder. So are the layers behind
    # the last one, which predict further tokens, unless one is trained.
    carried: tuple[str, ...] = ()
    # The layer for multi-token prediction, where `policy.mtp_coef` can train it.
    prediction: PredictionLayer | None = None
    # The object of `config.json` with the language model's fields; empty: `config.json` itself.
    within: str = ""
    # The `model_type` by which transformers has the network, if by another.
    known_as: str = ""
    # `model_type` in this object, of a family whose language models are of several types.
    text_type: str = ""
    # The class of the language model, if it is another one than the prefix makes.
    language_class: str = ""
    # Queries grow with their position (`llama_4_scaling_beta`).
    scaled_queries: bool = False
    # What carries the state in layers of the type `linear_attention`. Beside gated delta rules the
    # queries of attention have output gates, and norms scale by 1 + weight.
    recurrence: Recurrence | None = None
    # A layer is one block: a state, attention, a feed-forward net or experts.
    single_blocks: bool = False

    @property
    def key(self) -> str:
        """The name in `FAMILIES`."""
        return f"{self.model_type}/{self.text_type}" if self.text_type else self.model_type

    @property
    def classes(self) -> tuple[str, str]:
        """(language model, sequence classifier): the values of `architectures` that we convert."""
        language = self.language_class or f"{self.class_prefix}ForCausalLM"
        return language, f"{self.class_prefix}ForSequenceClassification"

    def expand(
        self, layer_kinds: Sequence[Collection[str]], num_experts: int, *, mtp: bool = False
    ) -> Iterator[Entry]:
        """Yield every entry of a model, embedding first, head last.

        Args:
            layer_kinds: the words that `Entry.layers` chooses each layer by.
            mtp: include the layer for multi-token prediction.
        """
        entries = [entry.renamed(self.in_folder) for entry in self.entries]
        before = [e for e in entries if not e.per_layer and e.megatron.startswith("embedding.")]
        layer = [e for e in entries if e.per_layer]
        after = [e for e in entries if not e.per_layer and e not in before]
        yield from before
        for number, kinds in enumerate(layer_kinds):
            yield from _layer(layer, number, kinds, num_experts)
        if mtp:
            yield from self._predicting(layer, len(layer_kinds), layer_kinds[-1], num_experts)
        yield from after

    def _predicting(
        self, rows: Sequence[Entry], number: int, kinds: Collection[str], num_experts: int
    ) -> Iterator[Entry]:
        """Yield the entries of the layer for multi-token prediction."""
        assert self.prediction is not None
        for entry in self.prediction.entries(number):
            yield entry.renamed(self.in_folder)
        usual = self.in_folder(f"model.layers.{number}.")
        own = self.in_folder(self.prediction.prefix.format(layer=number))
        for entry in _layer(rows, number, kinds, num_experts):
            megatron = entry.megatron.replace(f"decoder.layers.{number}.", MTP_LAYER)
            named = entry.renamed(lambda name: name.replace(usual, own))
            yield replace(named, megatron=megatron)

    def in_folder(self, name: str) -> str:
        """A name of the table, or its beginning, as folders of the family have it."""
        table, folder = self.prefix
        return folder + name.removeprefix(table) if name.startswith(table) else name


def _layer(
    rows: Sequence[Entry], number: int, kinds: Collection[str], num_experts: int
) -> Iterator[Entry]:
    """Yield the entries of one layer."""
    for entry in rows:
        if entry.layers == "all" or entry.layers in kinds:
            experts = range(num_experts) if entry.per_expert else (None,)
            yield from (entry.at(number, expert) for expert in experts)
