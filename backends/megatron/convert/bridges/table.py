"""A bridge's names and conversions as rows of a table of ours.

A proof shows that the conversions are the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.bridges.protocol import FamilyBridge
from backends.megatron.convert.families import TRUNK
from backends.megatron.convert.layout import hf_shapes, pack
from backends.megatron.convert.table import (
    OUTPUT_LAYER,
    VALUE_HEAD,
    WORD_EMBEDDING,
    Entry,
    Layers,
    Split,
    local_spelling,
)
from rlcore.errors import ModelError

# placeholders for the numbers of layer and expert, which no name contains otherwise
_LAYER = 7919
_EXPERT = 6007


@dataclass(frozen=True)
class _Question:
    """A parameter of our model, by its name in the spelling of Transformer Engine's layers."""

    name: str
    split: Split
    layers: Layers = "all"
    dtype: str | None = None

    @property
    def asked(self) -> str:
        """The name with placeholders for the numbers."""
        return self.name.format(layer=_LAYER, expert=_EXPERT)

    def entry(self, hf_names: list[str]) -> Entry:
        """The row of the table, from the bridge's answer."""
        layer = f"decoder.layers.{_LAYER}."
        ours = (
            layer + local_spelling(self.asked.removeprefix(layer))
            if self.asked.startswith(layer)
            else self.asked
        )
        megatron, *hf = (
            name.replace(str(_LAYER), "{layer}").replace(str(_EXPERT), "{expert}")
            for name in (ours, *hf_names)
        )
        return Entry(megatron, tuple(hf), self.split, self.layers, dtype=self.dtype)


def bridged_entries(bridge: FamilyBridge, arch: Architecture) -> tuple[Entry, ...]:
    """Make the table of a model with `arch.transformer` of the bridge's names.

    The row of the value head is ours. Raises ModelError where the bridge has no name for a
    parameter, or converts it in a way that our table cannot express.
    """
    narrow = replace(arch, transformer={**arch.transformer, "hidden_size": 1})
    entries: list[Entry] = []
    for question in _questions(arch):
        entry = question.entry(list(bridge.hf_names(question.asked)))
        _prove(bridge, narrow, question, entry)
        if entry.megatron == OUTPUT_LAYER and entry.hf == entries[0].hf:
            raise ModelError(
                f"{bridge.name} ties the output layer to the embedding, which"
                f" {arch.folder}/config.json does not say; set its tie_word_embeddings to true"
            )
        entries.append(entry)
    return (*entries, *(entry for entry in TRUNK if entry.megatron == VALUE_HEAD))


def _prove(bridge: FamilyBridge, narrow: Architecture, question: _Question, entry: Entry) -> None:
    """Convert numbered elements in both ways: the results must be equal."""
    one = entry.at(0, 0) if entry.per_expert else entry.at(0)
    shapes = hf_shapes(narrow, one)
    if len(shapes) == len(entry.hf):
        numbered = torch.arange(
            sum(torch.Size(shape).numel() for shape in shapes), dtype=torch.float32
        )
        pieces = [
            part.view(shape)
            for part, shape in zip(numbered.split([torch.Size(s).numel() for s in shapes]), shapes)
        ]
        theirs = bridge.to_megatron(question.asked, pieces)
        ours = torch.empty(sum(shape[0] for shape in shapes), *shapes[0][1:])
        pack(entry.split, pieces, narrow.transformer["kv_channels"], ours)
        if torch.equal(theirs, ours):
            return
    raise ModelError(
        f"{bridge.name} makes {entry.megatron} of {', '.join(entry.hf)} in another way than a"
        f" {entry.split.value} split; the family needs a table of its own"
    )


def _questions(arch: Architecture) -> Iterator[_Question]:
    """Yield every parameter of a model with these fields, in the order of a forward pass."""
    fields = arch.transformer
    layer = "decoder.layers.{layer}."
    attention = layer + "self_attention."
    yield _Question(WORD_EMBEDDING, Split.VOCAB)
    yield _Question(attention + "linear_qkv.layer_norm_weight", Split.REPLICATED)
    yield _Question(attention + "linear_qkv.weight", Split.QKV)
    if fields.get("add_qkv_bias"):
        yield _Question(attention + "linear_qkv.bias", Split.QKV)
    if fields.get("qk_layernorm"):
        yield _Question(attention + "q_layernorm.weight", Split.REPLICATED)
        yield _Question(attention + "k_layernorm.weight", Split.REPLICATED)
    yield _Question(attention + "linear_proj.weight", Split.ROW)
    if not all(arch.moe_layers):
        mlp = layer + "mlp."
        yield _Question(mlp + "linear_fc1.layer_norm_weight", Split.REPLICATED, "dense")
        yield _Question(mlp + "linear_fc1.weight", Split.GATED, "dense")
        yield _Question(mlp + "linear_fc2.weight", Split.ROW, "dense")
    if any(arch.moe_layers):
        yield from _expert_questions(arch, layer)
    yield _Question("decoder.final_layernorm.weight", Split.REPLICATED)
    if not arch.tie_word_embeddings:
        yield _Question(OUTPUT_LAYER, Split.VOCAB)


def _expert_questions(arch: Architecture, layer: str) -> Iterator[_Question]:
    fields = arch.transformer
    mlp = layer + "mlp."
    yield _Question(layer + "pre_mlp_layernorm.weight", Split.REPLICATED, "moe")
    yield _Question(mlp + "router.weight", Split.REPLICATED, "moe")
    if fields.get("moe_router_score_function") == "sigmoid":
        yield _Question(mlp + "router.expert_bias", Split.REPLICATED, "moe", dtype="float32")
    yield _Question(mlp + "experts.linear_fc1.weight{expert}", Split.GATED, "moe")
    yield _Question(mlp + "experts.linear_fc2.weight{expert}", Split.ROW, "moe")
    if fields.get("moe_shared_expert_intermediate_size"):
        yield _Question(mlp + "shared_experts.linear_fc1.weight", Split.GATED, "moe")
        yield _Question(mlp + "shared_experts.linear_fc2.weight", Split.ROW, "moe")
        if fields.get("moe_shared_expert_gate"):
            yield _Question(mlp + "shared_experts.gate_weight", Split.REPLICATED, "moe")
