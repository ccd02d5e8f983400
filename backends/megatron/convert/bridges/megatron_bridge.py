"""megatron-bridge (`pip install megatron-bridge`). It does not start without Transformer Engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.bridges.protocol import legacy_config
from backends.megatron.cpu.shim import importing_megatron
from rlcore.errors import ModelError

# of GPTModel
_ARGUMENTS = ("position_embedding_type", "rotary_base", "rotary_percent", "vocab_size")
_PIECES = {"QKVMapping": ("q", "k", "v"), "GatedMLPMapping": ("gate", "up")}
_AS_IT_IS = ("AutoMapping", "ReplicatedMapping", "ColumnParallelMapping", "RowParallelMapping")


def open_megatron_bridge(arch: Architecture) -> MegatronBridge:
    """Open megatron-bridge for the family of `arch`.

    Raises ModelError: megatron-bridge is missing, cannot be imported, or does not know the family.
    """
    try:
        with importing_megatron():
            from megatron.bridge import AutoBridge
    except ImportError as error:
        raise ModelError(
            f"model.bridge: megatron-bridge cannot be imported ({error}); install it by `pip"
            " install megatron-bridge` beside Transformer Engine, without which it does not start,"
            " or set model.bridge: mbridge"
        ) from error
    try:
        return MegatronBridge(AutoBridge.from_hf_config(legacy_config(arch)), arch)
    except ValueError as error:
        raise ModelError(
            f"model.bridge: megatron-bridge does not carry {arch.family}: {error}"
        ) from error


class MegatronBridge:
    """A `FamilyBridge` on megatron-bridge's AutoBridge of a configuration."""

    def __init__(self, auto: Any, arch: Architecture) -> None:
        self.name = f"megatron-bridge's {type(auto._model_bridge).__name__}"
        self._provider = auto.to_megatron_provider(load_weights=False)
        self._registry = auto._model_bridge.mapping_registry()
        sizes = "num_attention_heads", "num_query_groups", "kv_channels"
        self._narrow = SimpleNamespace(
            hidden_size=1, **{name: arch.transformer[name] for name in sizes}
        )

    def fields(self) -> Mapping[str, Any]:
        """See `FamilyBridge`."""
        from megatron.core.transformer import TransformerConfig

        return {
            f.name: getattr(self._provider, f.name) for f in dataclasses.fields(TransformerConfig)
        }

    def gpt_arguments(self) -> Mapping[str, Any]:
        """See `FamilyBridge`."""
        return {name: getattr(self._provider, name) for name in _ARGUMENTS}

    def hf_names(self, megatron: str) -> Sequence[str]:
        """See `FamilyBridge`."""
        mapping = self._mapping(megatron)
        if isinstance(mapping.hf_param, str):
            return (mapping.hf_param,)
        return [mapping.hf_param[piece] for piece in _PIECES[type(mapping).__name__]]

    def to_megatron(self, megatron: str, tensors: Sequence[Tensor]) -> Tensor:
        """See `FamilyBridge`."""
        from megatron.bridge.models.conversion.param_mapping import (
            merge_qkv_biases,
            merge_qkv_weights,
        )

        kind = type(self._mapping(megatron)).__name__
        if kind == "QKVMapping":
            merge = merge_qkv_biases if tensors[0].dim() == 1 else merge_qkv_weights
            parameter: Tensor = merge(self._narrow, *tensors)
            return parameter
        return torch.cat(list(tensors))

    def _mapping(self, megatron: str) -> Any:
        """The mapping of a parameter, of a kind whose conversion we know.

        Kinds are compared by exact class, since subclasses convert otherwise.
        """
        mapping = self._registry.megatron_to_hf_lookup(megatron)
        if mapping is None:
            raise ModelError(f"{self.name} has no tensor for the parameter {megatron}")
        kind = type(mapping).__name__
        split = kind in _PIECES and set(mapping.hf_param) == set(_PIECES[kind])
        plain = kind in _AS_IT_IS and isinstance(mapping.hf_param, str)
        if not (split or plain) or getattr(mapping, "permute_dims", None) is not None:
            raise ModelError(
                f"{self.name} converts {megatron} by a {kind}, which our table cannot say"
            )
        return mapping
