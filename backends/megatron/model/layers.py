"""The choice of layers, and whether their attention computes shared prefixes once.

Layers are Transformer Engine's if installed, on CUDA; otherwise Megatron's own.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

from rlcore.config import Config
from rlcore.config.sections.policy import Fp8Config
from rlcore.errors import ConfigError

# Fields of `TransformerConfig` that are forced off for Megatron's own layers.
FUSIONS = (
    "gradient_accumulation_fusion", "masked_softmax_fusion", "apply_rope_fusion",
    "persist_layer_norm", "bias_activation_fusion", "bias_dropout_fusion",
)  # fmt: skip

# Fields of `TransformerConfig`. The local MLP's activation is a module of ours, which Megatron
# builds because of the second field.
LOCAL_FIELDS: dict[str, Any] = {
    "transformer_impl": "local",
    "use_te_activation_func": True,
    **dict.fromkeys(FUSIONS, False),
}


@dataclass(frozen=True)
class Layers:
    """The choice and its reason: both are printed when a run starts."""

    kind: Literal["transformer_engine", "local"]
    reason: str

    @property
    def transformer_engine(self) -> bool:
        """Whether the layers are Transformer Engine's."""
        return self.kind == "transformer_engine"

    def __str__(self) -> str:
        layers = (
            "Transformer Engine"
            if self.transformer_engine
            else "megatron-core local spec, torch RMSNorm"
        )
        return f"{layers} ({self.reason})"


def choose_layers(
    wanted: Literal["auto", "off"],
    *,
    device: str,
    installed: bool,
    deterministic: bool,
    local_part: str | None = None,
    lora: bool = False,
) -> Layers:
    """Choose the layers for a device, "cpu" or "cuda". Pure.

    Args:
        local_part: see `Architecture.local_part`.
        lora: the model has adapters.
    """
    if wanted == "off":
        return Layers("local", "policy.transformer_engine: off")
    if device != "cuda":
        return Layers("local", f"Transformer Engine does not run on {device}")
    if not installed:
        return Layers("local", "Transformer Engine is not installed")
    if deterministic:
        return Layers("local", "run.deterministic: not proven for Transformer Engine")
    if local_part is not None:
        return Layers("local", f"{local_part} is not supported with Transformer Engine's layers")
    if lora:
        return Layers("local", "policy.lora: not supported with Transformer Engine's layers")
    return Layers("transformer_engine", "installed")


def layers_of(config: Config, device: str, *, local_part: str | None = None) -> Layers:
    """Choose the layers of a model of the run on this machine; `Architecture.local_part`.

    Raises ConfigError if FP8 is configured and the layers do not support it.
    """
    layers = choose_layers(
        config.policy.transformer_engine,
        device=device,
        installed=importlib.util.find_spec("transformer_engine") is not None,
        deterministic=config.run.deterministic,
        local_part=local_part,
        lora=config.policy.lora is not None,
    )
    if config.policy.fp8 is not None and not layers.transformer_engine:
        raise ConfigError(
            f"policy.fp8: needs Transformer Engine's layers, got {layers}; remove policy.fp8"
        )
    return layers


_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


@dataclass(frozen=True)
class PrefixSharing:
    """Whether shared prefixes are computed once, and the reason; printed when a run starts."""

    on: bool
    reason: str

    def __str__(self) -> str:
        return f"{'computed once' if self.on else 'in every sequence'} ({self.reason})"


def choose_prefix_sharing(
    config: Config, layers: Layers, why_whole: str | None = None
) -> PrefixSharing:
    """Choose whether shared prefixes are computed once.

    Args:
        why_whole: `Architecture.why_whole` of a model of the run that has a reason.

    Raises ConfigError if `policy.share_prefixes` is `on`, but the run does not support it.
    """
    wanted = config.policy.share_prefixes
    if wanted == "off":
        return PrefixSharing(False, "policy.share_prefixes: off")
    if why_whole is not None:
        why_not = why_whole
    elif layers.transformer_engine:
        why_not = (
            "the attention of Transformer Engine's layers has no mask for it"
            " (policy.transformer_engine: off takes megatron-core's own layers)"
        )
    elif losses := [name for name in _LOSSES if config.policy.megatron.get(name)]:
        why_not = f"policy.megatron.{losses[0]}: a router's loss would count a shared token once"
    elif config.policy.mtp_coef:
        why_not = "policy.mtp_coef: sequences that share a token may differ in the next one"
    else:
        return PrefixSharing(True, f"policy.share_prefixes: {wanted}")
    if wanted == "on":
        raise ConfigError(
            f"policy.share_prefixes: on, but {why_not}; set it to auto or off, or change that"
        )
    return PrefixSharing(False, why_not)


def layer_fields(layers: Layers, *, experts: bool, fp8: Fp8Config | None) -> dict[str, Any]:
    """The fields of `TransformerConfig` that belong to the choice.

    Of Transformer Engine's fusions two stay off: that of gradient accumulation asks the head, which
    is Megatron's own layer, for APEX, and that of the router bypasses the replay of routing.
    """
    if not layers.transformer_engine:
        return LOCAL_FIELDS
    fields: dict[str, Any] = {
        "transformer_impl": "transformer_engine",
        "use_te_activation_func": False,
        "bias_activation_fusion": True,
        "moe_grouped_gemm": experts,
        "moe_permute_fusion": experts,
    }
    if fp8 is not None:
        fields |= {
            "fp8": fp8.format,
            "fp8_recipe": fp8.recipe,
            "fp8_margin": fp8.margin,
            "fp8_amax_history_len": fp8.amax_history,
            "fp8_amax_compute_algo": fp8.amax_compute,
            "moe_router_padding_for_quantization": experts,
        }
    return fields
