"""The architecture of a model in Megatron's terms, and its Hugging Face tensors.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.rope import Rope
from backends.megatron.convert.table import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    MTP,
    OUTPUT_LAYER,
    SLIDING_ATTENTION,
    VALUE_HEAD,
    Entry,
    Family,
)
from rlcore.planning.shape import ModelShape


@dataclass(frozen=True)
class Architecture:
    """A model as its `config.json` describes it.

    `transformer` holds keyword arguments of megatron.core's `TransformerConfig` (of its
    `MLATransformerConfig` with latent attention), without layout, dtype and activation: the model
    builder adds `activation_func` by the family's name of it ("silu" is torch's `F.silu`).
    """

    family: str
    hf_config: dict[str, Any]
    vocab_size: int  # without Megatron's padding
    tie_word_embeddings: bool
    max_position_embeddings: int
    # The rotary positions of each layer; None: a layer without.
    ropes: tuple[Rope | None, ...]
    transformer: dict[str, Any]
    # Of each layer, the number of keys up to its own that a query sees (None: all); empty: all.
    windows: tuple[int | None, ...] = ()
    # Of each layer, its only block: a word of `Entry.layers`; empty: a layer has attention, or a
    # state, and a feed-forward net or experts.
    blocks: tuple[str, ...] = ()
    # (KV heads, head size) of layers without a window, where they are others.
    full_heads: tuple[int, int] | None = None
    # Logits are cap * tanh(logits / cap); None: not capped.
    logit_cap: float | None = None
    # The longest sequence for which our attention is the model's; None: any.
    max_tokens: int | None = None
    # "value": a `*ForSequenceClassification` folder with one label.
    head: Literal["lm", "value"] = "lm"
    folder: Path = Path()
    # Whether the model has its layer for multi-token prediction, which is trained then.
    mtp: bool = False

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return int(self.transformer["num_layers"])

    @property
    def table(self) -> Family:
        """The conversion table of the model's family."""
        return FAMILIES[self.family]

    @property
    def num_experts(self) -> int:
        """The number of routed experts in a layer with experts; 0 for a dense model."""
        return int(self.transformer.get("num_moe_experts") or 0)

    @property
    def latent_attention(self) -> bool:
        """Whether keys and values come from a shared low-rank form."""
        return self.table.latent_attention

    @property
    def local_part(self) -> str | None:
        """A part of the layers that Transformer Engine's do not have; None: they have all."""
        if self.latent_attention:
            return "latent attention"
        if any(self.recurrent_layers):
            return "a layer with a state"
        if self.blocks:
            return "a layer of one block"
        if self.table.norm_over_heads:
            return "a norm over all heads of queries or keys"
        if self.table.sinks:
            return "attention with sinks"
        if self.table.windows:
            return "attention with windows"
        if self.table.norms_behind:
            return "a norm behind attention"
        return None

    @property
    def why_whole(self) -> str | None:
        """Why each sequence is computed whole, without a prefix of another one; None: no reason."""
        if any(rope is not None and rope.by_length for rope in self.ropes):
            return "with longrope a token's angle depends on the length of its sequence"
        if any(self.recurrent_layers):
            return "the model's layers carry a state, which is not passed on at a prefix's end"
        return None

    @property
    def shape(self) -> ModelShape:
        """The sizes of the model, for plans and costs."""
        latent = 0
        if self.latent_attention:
            first = "decoder.layers.0.self_attention."
            own = [entry for entry in self.entries() if entry.megatron.startswith(first)]
            latent = sum(math.prod(shape) for entry in own for shape in part_shapes(self, entry))
        return ModelShape.of_fields(
            self.transformer,
            vocab=self.vocab_size,
            tied=self.tie_word_embeddings,
            latent=latent,
            norm_over_heads=self.table.norm_over_heads,
            mlp_layers=tuple(block == "dense" for block in self.blocks),
            windows=self.windows,
            mtp=self.mtp,
            sandwich=self.table.norms_before and self.table.norms_behind,
            normed_values=self.table.normed_values,
            full_heads=self.full_heads,
        )

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes by which the tables give shapes.

        `query` and `key` are the rows of the projections, with output gates, `attended` is the
        width of all heads' values; `q_low` to `kv_up` belong to latent attention, those of
        `_state_sizes` to recurrent layers.
        """
        t = self.transformer
        heads = t["num_attention_heads"]
        head = t["kv_channels"]
        sizes = {
            "one": 1,
            "heads": heads,
            "vocab": self.vocab_size,
            "hidden": t["hidden_size"],
            "hidden_and_embedding": 2 * t["hidden_size"],
            "ffn": t["ffn_hidden_size"],
            "experts": self.num_experts,
            "expert_ffn": t.get("moe_ffn_hidden_size"),
            "shared_ffn": t.get("moe_shared_expert_intermediate_size"),
            "head": head,
            "query": heads * head * (2 if t.get("attention_output_gate") else 1),
            "key": t["num_query_groups"] * head,
            "attended": heads * t.get("v_head_dim", head),
        }
        if self.latent_attention:
            low = t["kv_lora_rank"]
            sizes |= {
                "q_low": t["q_lora_rank"],
                "kv_low": low,
                "kv_down": low + t["qk_pos_emb_head_dim"],
                "kv_up": heads * (t["qk_head_dim"] + t["v_head_dim"]),
            }
        if any(self.recurrent_layers):
            sizes |= _state_sizes(t)
        if self.full_heads is not None:
            groups, size = self.full_heads
            sizes |= {"full_head": size, "full_query": heads * size, "full_key": groups * size}
        return sizes

    @property
    def layer_kinds(self) -> list[tuple[str, ...]]:
        """For each layer, the words by which the table chooses its entries."""
        if self.blocks:
            return [(block,) for block in self.blocks]
        windows = self.windows or [None] * self.num_layers
        attention = [FULL_ATTENTION if window is None else SLIDING_ATTENTION for window in windows]
        return [
            ("moe" if has else "dense", LINEAR_ATTENTION if recurrent else kind)
            for has, recurrent, kind in zip(self.moe_layers, self.recurrent_layers, attention)
        ]

    @property
    def moe_layers(self) -> list[bool]:
        """For each layer, whether it has experts."""
        every = self.transformer.get("moe_layer_freq", 1)
        if isinstance(every, list):
            return [bool(has) for has in every]
        return [self.num_experts > 0] * self.num_layers

    @property
    def recurrent_layers(self) -> list[bool]:
        """For each layer, whether a state takes the place of attention."""
        kinds = self.transformer.get("linear_attention_freq") or [0] * self.num_layers
        return [bool(recurrent) for recurrent in kinds]

    def computes_like(self, other: Architecture) -> bool:
        """Whether the other model's modules with this model's weights compute the same."""
        computed = (
            "family",
            "transformer",
            "tie_word_embeddings",
            "ropes",
            "windows",
            "blocks",
            "full_heads",
            "logit_cap",
        )
        return all(getattr(self, name) == getattr(other, name) for name in computed)

    def entries(self) -> list[Entry]:
        """The table expanded to every layer and expert, in the order of a forward pass."""
        expanded = self.table.expand(self.layer_kinds, self.num_experts, mtp=self.mtp)
        return [entry for entry in expanded if entry.is_in(self.transformer)]


def _state_sizes(fields: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of a recurrent layer; `delta_*` are those of a gated delta rule."""
    heads = fields["linear_num_value_heads"]
    key_heads = fields["linear_num_key_heads"]
    keys = key_heads * fields["linear_key_head_dim"]
    values = heads * fields["linear_value_head_dim"]
    return {
        "state_key": fields["linear_key_head_dim"],
        "state_keys": keys,
        "state_value": fields["linear_value_head_dim"],
        "state_values": values,
        "state_heads": heads,
        "conv_width": fields["linear_conv_kernel_dim"],
        # Of queries, keys, values and output gates together; of rates and decays.
        "delta_qkvz": 2 * (keys + values),
        "delta_ba": 2 * heads,
        # Rates and decays of the heads of one key head.
        "delta_ba_of_key": 2 * heads // key_heads,
    }


# --- tensors of the folder ------------------------------------------------------------------------


def model_entries(arch: Architecture, head: str) -> list[Entry]:
    """The entries of a model with an "lm" or "value" head, in the order of a forward pass."""
    absent = {VALUE_HEAD} if head == "lm" else {OUTPUT_LAYER}
    if arch.tie_word_embeddings:
        absent.add(OUTPUT_LAYER)
    return [
        entry
        for entry in arch.entries()
        if entry.megatron not in absent and (head == "lm" or not entry.megatron.startswith(MTP))
    ]


def weight_tensors(
    arch: Architecture, dtype: str, head: str
) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and dtype of every tensor, in the order of a publication.

    This is the order of a forward pass, except that weights with a fixed dtype come last, since no
    bucket mixes dtypes. Tied models have no `lm_head.weight`; vocabulary padding is left out.

    Args:
        dtype: the dtype of all other weights, such as "bfloat16".
    """
    for entry in sorted(model_entries(arch, head), key=lambda entry: entry.dtype is not None):
        # The tensors of all experts belong to the entries of each.
        if not entry.expert or not entry.parts[0].of_experts:
            for name, shape in tensor_shapes(arch, entry).items():
                yield name, shape, entry.dtype or dtype


def tensor_shapes(arch: Architecture, entry: Entry) -> dict[str, tuple[int, ...]]:
    """The full shape of each Hugging Face tensor of an entry, without vocabulary padding."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name in entry.names:
        parts = [part for part in entry.parts if part.name == name]
        first = parts[0]
        rest = first.sizes(arch.sizes)[1:]
        shape = (sum(part.sizes(arch.sizes)[0] for part in parts), *rest)
        if first.transposed:
            shape = shape[::-1]
        shapes[name] = (arch.num_experts, *shape) if first.of_experts else shape
    return shapes


def part_shapes(arch: Architecture, entry: Entry) -> list[tuple[int, ...]]:
    """The full shape of each part of an entry, without vocabulary padding."""
    return [part.sizes(arch.sizes) for part in entry.parts]
