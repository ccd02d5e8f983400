"""The packages that know families which we may not know, behind one interface.

mbridge (`pip install mbridge einops`) runs without Transformer Engine and without CUDA;
megatron-bridge (`pip install megatron-bridge`) does not start without Transformer Engine. Both are
written for transformers 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from backends.megatron.convert.architecture import Architecture
from backends.megatron.cpu.shim import importing_megatron
from rlcore.errors import ModelError

# Layers that predict further tokens are left out, as transformers leaves them out.
PREDICTED_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")

# of GPTModel
_ARGUMENTS = ("position_embedding_type", "rotary_base", "rotary_percent", "vocab_size")
_PIECES = {"QKVMapping": ("q", "k", "v"), "GatedMLPMapping": ("gate", "up")}
_AS_IT_IS = ("AutoMapping", "ReplicatedMapping", "ColumnParallelMapping", "RowParallelMapping")


class FamilyBridge(Protocol):
    """One family of one package, for one folder.

    Parameters have Megatron's names as Transformer Engine's layers spell them
    (`linear_qkv.layer_norm_weight`, `experts.linear_fc1.weight3`), with layer and expert counted
    over the whole model.
    """

    name: str  # package and class, for messages

    def fields(self) -> Mapping[str, Any]:
        """The fields of `TransformerConfig` that it sets."""
        ...

    def gpt_arguments(self) -> Mapping[str, Any]:
        """Keyword arguments of `GPTModel` that it sets, beside configuration and layers."""
        ...

    def hf_names(self, megatron: str) -> Sequence[str]:
        """The Hugging Face tensors that make a parameter. Raises ModelError if it knows none."""
        ...

    def to_megatron(self, megatron: str, tensors: Sequence[Tensor]) -> Tensor:
        """Convert whole tensors (no rank's part) of a model with a hidden size of 1."""
        ...


def _legacy_config(arch: Architecture, **changes: Any) -> Any:
    """Make the object that transformers 4 made of `config.json`.

    No code of the folder is run: a `model_type` that transformers does not have becomes a plain
    configuration.
    """
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = {
        key: value
        for key, value in arch.hf_config.items()
        if key not in ("model_type", "auto_map", *PREDICTED_LAYERS)
    }
    # The mapping is lazy: its `get` knows only types that were used before.
    kind: Any = CONFIG_MAPPING[arch.family] if arch.family in CONFIG_MAPPING else PretrainedConfig  # noqa: SIM401
    made: Any = kind(**config)
    made.model_type = arch.family
    rope = getattr(made, "rope_parameters", None) or {}
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    extra = {
        "rope_theta": arch.rope_theta,
        # `read_rope` has read it, and refused kinds that Megatron does not compute.
        "rope_parameters" if hasattr(made, "rope_parameters") else "rope_scaling": None,
        "partial_rotary_factor": 1.0 if partial is None else partial,
        "head_dim": arch.transformer["kv_channels"],
        **changes,
    }
    # the class has a default of its own
    extra |= {key: 0 for key in PREDICTED_LAYERS if hasattr(made, key)}
    for key, value in extra.items():
        setattr(made, key, value)
    return made


def open_mbridge(arch: Architecture) -> MBridge:
    """Open mbridge for the family of `arch`.

    Raises ModelError: mbridge is missing or broken, does not know the family, or builds its layers
    itself.
    """
    try:
        with importing_megatron():
            import mbridge.core
            from mbridge.core.bridge import _MODEL_REGISTRY
    except ImportError as error:
        raise ModelError(
            f"model.bridge: mbridge cannot be imported ({error}); install it by `pip"
            " install mbridge==0.15.1 einops`"
        ) from error
    known = _MODEL_REGISTRY.get(arch.family)
    base = mbridge.core.LLMBridge
    if known is None:
        has = ", ".join(sorted(_MODEL_REGISTRY))
        raise ModelError(f"model.bridge: mbridge has no model_type {arch.family!r}; it has {has}")
    own = "_get_transformer_layer_spec", "_model_provider"
    if not issubclass(known, base) or any(
        getattr(known, name) is not getattr(base, name) for name in own
    ):
        raise ModelError(
            f"model.bridge: mbridge's {known.__name__} ({arch.family}) builds a model of its own;"
            " only families whose model is Megatron's GPTModel with plain layers can be carried"
        )
    return MBridge(known, arch)


class MBridge:
    """A `FamilyBridge` on a class of mbridge.

    It has two instances: one of the model as it is, and one with a hidden size of 1 for
    `to_megatron`.
    """

    def __init__(self, kind: type, arch: Architecture) -> None:
        self.name = f"mbridge's {kind.__name__}"
        # Without the copy a tied model would rename the output layer of every later model of the
        # class.
        direct = dict(kind._DIRECT_MAPPING)  # type: ignore[attr-defined]
        changes = {"TransformerConfigClass": _Given, "_DIRECT_MAPPING": direct}
        self._kind: Any = type(kind.__name__, (kind,), changes)
        self._bridge = self._make(arch)
        self._narrow = self._make(arch, hidden_size=1)

    def _make(self, arch: Architecture, **changes: Any) -> Any:
        from mbridge.core.parallel_states import ParallelStates

        try:
            return self._kind(
                _legacy_config(arch, **changes),
                dtype=torch.float32,
                parallel_states=ParallelStates(),
            )
        except AttributeError as error:
            raise ModelError(
                f"{arch.folder}/config.json: {self.name} needs more of it: {error}"
            ) from error

    def fields(self) -> Mapping[str, Any]:
        """See `FamilyBridge`."""
        return vars(self._bridge.config)

    def gpt_arguments(self) -> Mapping[str, Any]:
        """See `FamilyBridge`."""
        arguments: dict[str, Any] = self._bridge._get_gptmodel_args()
        return arguments

    def hf_names(self, megatron: str) -> Sequence[str]:
        """See `FamilyBridge`."""
        try:
            names: list[str] = self._bridge._weight_name_mapping_mcore_to_hf(megatron)
        except NotImplementedError as error:
            raise ModelError(f"{self.name} has no tensor for the parameter {megatron}") from error
        return names

    def to_megatron(self, megatron: str, tensors: Sequence[Tensor]) -> Tensor:
        """See `FamilyBridge`."""
        parameter: Tensor = self._narrow._weight_to_mcore_format(megatron, list(tensors))
        return parameter


class _Given(SimpleNamespace):
    """Replaces mbridge's TransformerConfig: the fields that it sets, else Megatron's defaults."""

    def __getattr__(self, name: str) -> Any:
        with importing_megatron():
            from megatron.core.transformer import TransformerConfig
        return getattr(TransformerConfig, name)


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
        return MegatronBridge(AutoBridge.from_hf_config(_legacy_config(arch)), arch)
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


BRIDGES: dict[str, Callable[[Architecture], FamilyBridge]] = {
    "mbridge": open_mbridge,
    "megatron-bridge": open_megatron_bridge,
}
