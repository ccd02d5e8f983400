"""The architecture of a model in Megatron's terms, and its Hugging Face tensors.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.fields import latent_shapes
from backends.megatron.convert.table import OUTPUT_LAYER, VALUE_HEAD, Entry, Family, Split
from rlcore.planning.shape import ModelShape


@dataclass(frozen=True)
class Architecture:
    """A model as its `config.json` describes it.

    `transformer` holds keyword arguments of megatron.core's `TransformerConfig` (of `LatentConfig`
    with latent attention), without layout, dtype and activation: the model builder adds
    `activation_func` by the name in `activation` ("silu" is torch's `F.silu`). `rope_theta` is the
    `rotary_base` of `GPTModel`; `rope_scaling` holds further keyword arguments of `GPTModel`
    (`rope_scaling`, `rope_scaling_factor`, `seq_len_interpolation_factor`, `rotary_percent`), or is
    None.
    """

    family: str
    hf_config: dict[str, Any]
    vocab_size: int  # without Megatron's padding
    tie_word_embeddings: bool
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    transformer: dict[str, Any]
    activation: Literal["silu"] = "silu"
    # "value": a `*ForSequenceClassification` folder with one label.
    head: Literal["lm", "value"] = "lm"
    folder: Path = Path()

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
    def shape(self) -> ModelShape:
        """The sizes of the model, for plans and costs."""
        latent = sum(math.prod(size) for size in latent_shapes(self.transformer).values())
        return ModelShape.of_fields(
            self.transformer, vocab=self.vocab_size, tied=self.tie_word_embeddings, latent=latent
        )

    @property
    def moe_layers(self) -> list[bool]:
        """For each layer, whether it has experts."""
        every = self.transformer.get("moe_layer_freq", 1)
        if isinstance(every, list):
            return [bool(has) for has in every]
        return [self.num_experts > 0] * self.num_layers

    def computes_like(self, other: Architecture) -> bool:
        """Whether the other model's modules with this model's weights compute the same."""
        computed = (
            "family",
            "transformer",
            "activation",
            "tie_word_embeddings",
            "rope_theta",
            "rope_scaling",
        )
        return all(getattr(self, name) == getattr(other, name) for name in computed)

    def entries(self) -> list[Entry]:
        """The table expanded to every layer and expert, in the order of a forward pass."""
        expanded = self.table.expand(self.moe_layers, self.num_experts)
        return [entry for entry in expanded if entry.is_in(self.transformer)]


# --- tensors of the folder ------------------------------------------------------------------------


def model_entries(arch: Architecture, head: str) -> list[Entry]:
    """The entries of a model with an "lm" or "value" head, in the order of a forward pass."""
    absent = {VALUE_HEAD} if head == "lm" else {OUTPUT_LAYER}
    if arch.tie_word_embeddings:
        absent.add(OUTPUT_LAYER)
    return [entry for entry in arch.entries() if entry.megatron not in absent]


def weight_tensors(
    arch: Architecture, dtype: str, head: str
) -> Iterator[tuple[Entry, str, tuple[int, ...], str]]:
    """Yield entry, name, shape and dtype of every tensor, in the order of a publication.

    This is the order of a forward pass, except that weights with a fixed dtype come last, since no
    bucket mixes dtypes. Tied models have no `lm_head.weight`; vocabulary padding is left out.

    Args:
        dtype: the dtype of all other weights, such as "bfloat16".
    """
    for entry in sorted(model_entries(arch, head), key=lambda entry: entry.dtype is not None):
        for name, shape in zip(entry.hf, hf_shapes(arch, entry)):
            yield entry, name, shape, entry.dtype or dtype


def hf_shapes(arch: Architecture, entry: Entry) -> list[tuple[int, ...]]:
    """The full shape of each Hugging Face tensor of an entry, without vocabulary padding."""
    t = arch.transformer
    hidden = t["hidden_size"]
    width = "ffn_hidden_size"
    if entry.expert is not None:
        width = "moe_ffn_hidden_size"
    elif ".shared_experts." in entry.megatron:
        width = "moe_shared_expert_intermediate_size"
    ffn = t[width]
    head_dim = t["kv_channels"]
    query = t["num_attention_heads"] * head_dim
    key = t["num_query_groups"] * head_dim
    if entry.split is Split.VOCAB:
        return [(arch.vocab_size, hidden)]
    if latent := latent_shapes(t).get(entry.megatron.rpartition(".self_attention.")[2]):
        return [latent]
    if entry.split is Split.GATED:
        return [(ffn, hidden), (ffn, hidden)]
    if entry.split is Split.QKV:
        tail = () if entry.megatron.endswith(".bias") else (hidden,)
        return [(query, *tail), (key, *tail), (key, *tail)]
    if entry.split is Split.ROW:
        return [(hidden, ffn if ".mlp." in entry.megatron else query)]
    if entry.megatron == VALUE_HEAD or entry.megatron.endswith(".shared_experts.gate_weight"):
        return [(1, hidden)]
    if entry.megatron.endswith(".router.weight"):
        return [(arch.num_experts, hidden)]
    if entry.megatron.endswith(".router.expert_bias"):
        return [(arch.num_experts,)]
    if entry.split is Split.REPLICATED:
        per_head = entry.megatron.endswith(("q_layernorm.weight", "k_layernorm.weight"))
        return [(head_dim if per_head else hidden,)]
    raise TypeError(f"{entry.megatron}: no shape rule for a {entry.split.value} split")
