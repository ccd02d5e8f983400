"""mbridge (`pip install mbridge einops`). It runs without Transformer Engine and without CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.bridges.protocol import legacy_config
from backends.megatron.cpu.shim import importing_megatron
from rlcore.errors import ModelError

INSTALL = "pip install mbridge==0.15.1 einops"


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
            f"model.bridge: mbridge cannot be imported ({error}); install it by `{INSTALL}`"
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
                legacy_config(arch, **changes),
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
