"""The architecture of a model in Megatron's terms. Imports neither torch nor Megatron."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.fields import latent_shapes
from backends.megatron.convert.table import Entry, Family
from rlcore.planning.shape import ModelShape


@dataclass(frozen=True)
class Architecture:
    """A model as its `config.json` describes it.

    `transformer` holds keyword arguments of megatron.core's `TransformerConfig` (with latent
    attention, of `LatentConfig`), without layout, dtype and activation: the model builder adds
    `activation_func` by the name in `activation` ("silu" is torch's `F.silu`). `rope_scaling` holds
    further keyword arguments of `GPTModel` (`rope_scaling`, `rope_scaling_factor`,
    `seq_len_interpolation_factor`, `rotary_percent`), or is None; `rope_theta` is its
    `rotary_base`.
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
    # "value": a `*ForSequenceClassification` folder with one label
    head: Literal["lm", "value"] = "lm"
    folder: Path = Path()

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return int(self.transformer["num_layers"])

    @property
    def table(self) -> Family:
        """The conversion table of its family."""
        return FAMILIES[self.family]

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that has them; 0 for a dense model."""
        return int(self.transformer.get("num_moe_experts") or 0)

    @property
    def latent_attention(self) -> bool:
        """Whether keys and values are made of one low-rank form."""
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
        """Whether modules of the other model with this one's weights compute what this one does."""
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
        """The table with every layer and expert written out, in the order of a forward pass."""
        expanded = self.table.expand(self.moe_layers, self.num_experts)
        return [entry for entry in expanded if entry.is_in(self.transformer)]
