"""The table entries of the parameters of a built model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.table import OUTPUT_LAYER, WORD_EMBEDDING, Entry, local_spelling
from rlcore.weights import saved_buffers

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.(.*)$")
_EXPERT = re.compile(r"^mlp\.experts\.local_experts\.(\d+)\.(.*)$")


def unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside DistributedDataParallel and Float16Module."""
    while not hasattr(chunk, "decoder"):
        inner = getattr(chunk, "module", None)
        if not isinstance(inner, nn.Module):
            raise TypeError(
                f"{type(chunk).__name__}: a module without a decoder, expected a GPTModel or a"
                " wrapper"
            )
        chunk = inner
    return chunk


def global_name(model: nn.Module, name: str) -> str:
    """A parameter's name with layer and expert counted over the whole model.

    It is spelled as in the local layer spec.
    """
    match = _LAYER.match(name)
    if match is None:
        return name
    layer = model.get_submodule(f"decoder.layers.{match[1]}")
    rest = local_spelling(match[2])
    if expert := _EXPERT.match(rest):
        here: list[int] = layer.mlp.local_expert_indices  # type: ignore[union-attr,assignment]
        rest = f"mlp.experts.local_experts.{here[int(expert[1])]}.{expert[2]}"
    return f"decoder.layers.{int(layer.layer_number) - 1}.{rest}"  # type: ignore[arg-type]


def owned_parameters(
    chunks: Sequence[nn.Module], arch: Architecture
) -> Iterator[tuple[Entry, Tensor, bool]]:
    """Yield (entry, weight, is a copy) of this rank's parameters, and of saved buffers.

    With tied embeddings and pipeline stages the last stage holds a copy of the first stage's word
    embedding as its output layer: it is loaded like the embedding and never exported.
    """
    table = {entry.megatron: entry for entry in arch.entries()}
    for chunk in chunks:
        model = unwrap(chunk)
        for local, param in named_weights(model):
            name = global_name(model, local)
            copy = name == OUTPUT_LAYER and arch.tie_word_embeddings
            entry = table.get(WORD_EMBEDDING if copy else name)
            if entry is None:
                raise KeyError(f"{name}: no entry in the {arch.family} table")
            yield entry, param, copy


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a model, then the buffers that its folder holds."""
    yield from model.named_parameters()
    yield from saved_buffers(model)
