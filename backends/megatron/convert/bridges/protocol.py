"""The interface of a package that knows families which we may not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from backends.megatron.convert.architecture import Architecture


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


def legacy_config(arch: Architecture, **changes: Any) -> Any:
    """Make the object that transformers 4 made of `config.json`: both packages are written for it.

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
        # `read._rope` has read it, and refused kinds that Megatron does not compute.
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


# Layers that predict further tokens are left out, as transformers leaves them out.
PREDICTED_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers")
