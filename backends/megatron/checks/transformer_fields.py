"""Checks of the TransformerConfig fields that `policy.megatron` sets.

A field may change how a step is computed, never the result of the step. Some choices of activation
recomputation would fail, give wrong results or do nothing.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer import TransformerConfig

from backends.megatron.checks.layout import layers_of_stages
from backends.megatron.convert.architecture import Architecture
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import ConfigError

INIT_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")

_OF_FULL = ("recompute_method", "recompute_num_layers", "distribute_saved_activations")
_OF_RECOMPUTATION = (*_OF_FULL, "recompute_modules")
_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")

# The fields that may be set. A version of megatron-core brings dozens of fields, and one that
# changes the result of a step would do so without a word.
ALLOWED = (
    "recompute_granularity", *_OF_RECOMPUTATION, "moe_layer_recompute", *_LOSSES,
    "moe_token_dispatcher_type", "moe_router_dtype", "batch_invariant_mode", "deterministic_mode",
    "batch_p2p_sync", "fp32_residual_connection", "disable_bf16_reduced_precision_matmul",
)  # fmt: skip

# The fields that may be set with Transformer Engine's layers.
ALLOWED_WITH_TE = (
    "gradient_accumulation_fusion", "bias_activation_fusion", "bias_dropout_fusion",
    "use_te_activation_func", "cpu_offloading", "cpu_offloading_num_layers",
    "cpu_offloading_activations", "cpu_offloading_weights", "cpu_offloading_double_buffering",
    "first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
    "tp_only_amax_red", "moe_permute_fusion", "moe_router_fusion", "moe_enable_deepep",
    "moe_flex_dispatcher_backend", "moe_deepep_num_sms", "moe_hybridep_num_sms",
)  # fmt: skip

_MODEL = "the model folder decides it"
_DENSE = "the model has no experts"

# Why other fields are refused, where users of Megatron might expect them.
REFUSED: dict[str, tuple[str, ...]] = {
    "set it under policy.parallel": (
        "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    "set model.dtype": (
        "params_dtype", "pipeline_dtype", "bf16", "fp16", "autocast_dtype", "enable_autocast"),
    "set policy.fp8, which needs Transformer Engine": (
        "fp8", "fp8_recipe", "fp8_margin", "fp8_amax_history_len", "fp8_amax_compute_algo"),
    "dropout is off: it would make noise of the ratio between two policies": (
        "hidden_dropout", "attention_dropout"),
    "it would make noise of the ratio between two policies": ("moe_input_jitter_eps",),
    "weights come from a model folder": (
        *INIT_METHODS, "init_method_std", "embedding_init_method_std", "perform_initialization",
        "use_cpu_initialization", "init_model_with_meta_device"),
    "packed sequences and weighted losses depend on it": (
        "calculate_per_token_loss", "variable_seq_lengths", "deallocate_pipeline_outputs"),
    "it follows from the pipeline schedule: batched transfers are ambiguous where two stages"
    " exchange several chunks (pipeline 2 with virtual_pipeline > 1), and the gradients come out"
    " wrong without a word; leave it out": ("overlap_p2p_comm", "batch_p2p_comm"),
    "a token's experts would depend on the other tokens, and so would its log-prob": (
        "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_dropping",
        "moe_token_drop_policy", "moe_router_force_load_balancing"),
    "the auxiliary loss is that of a micro-batch; its coefficient is moe_aux_loss_coeff": (
        "moe_router_load_balancing_type",),
    "set policy.routing_replay": ("moe_enable_routing_replay",),
    "the packed attention does not have it, so it would do nothing": (
        "window_size", "softmax_type", "attention_softmax_in_fp32", "attention_backend"),
    "policy.transformer_engine and policy.fp8 decide it": ("transformer_impl", "moe_grouped_gemm"),
    "its buffers are made for one size, and packs have many": (
        "enable_cuda_graph", "tp_comm_overlap"),
}  # fmt: skip

_RECOMPUTED_PARTS = (
    "core_attn",
    "mlp",
    "moe",
    "shared_experts",
    "layernorm",
    "moe_act",
    "mla_up_proj",
)


def check_overrides(
    overrides: Mapping[str, Any], arch: Architecture, *, te_layers: bool = False
) -> None:
    """Refuse unknown fields, and all fields but those that are proven with packs.

    Args:
        te_layers: the layers are Transformer Engine's.

    Raises ConfigError naming the key, and the nearest field or the reason.
    """
    fields = {f.name for f in dataclasses.fields(TransformerConfig) if f.init}
    for key in overrides:
        if key not in fields:
            nearest = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise _refused(key, f"megatron.core's TransformerConfig has no such field{hint}")
        reason = _reason(key, arch, te_layers)
        if reason:
            raise _refused(key, f"cannot be set here: {reason}")
        if key in _LOSSES and not isinstance(overrides[key], (int, float)):
            raise _refused(key, f"got {overrides[key]!r}, expected a number")


def _reason(key: str, arch: Architecture, te_layers: bool) -> str | None:
    if key in arch.transformer:
        return _MODEL
    allowed = (*ALLOWED, *ALLOWED_WITH_TE) if te_layers else ALLOWED
    if key in allowed:
        return _DENSE if key.startswith("moe_") and not arch.num_experts else None
    if key in ALLOWED_WITH_TE:
        return "it needs Transformer Engine's layers, which this run does not use"
    known = (reason for reason, fields in REFUSED.items() if key in fields)
    return next(known, f"it is not proven with packs; expected one of {', '.join(allowed)}")


# --- recomputation --------------------------------------------------------------------------------


def check_recompute(
    given: Mapping[str, Any],
    arch: Architecture,
    parallel: ParallelConfig,
    *,
    te_layers: bool | None = None,
) -> None:
    """Refuse a choice that changes the gradients or saves nothing.

    Args:
        given: `policy.megatron`; fields that do not concern recomputation are ignored.
        te_layers: whether the layers are Transformer Engine's; None: unknown.

    Raises ConfigError naming the key, its value and values that work.
    """
    granularity = given.get("recompute_granularity")
    if given.get("moe_layer_recompute"):
        raise _refused(
            "moe_layer_recompute",
            "Megatron gives it up; set recompute_granularity=selective and recompute_modules=[moe]",
        )
    if granularity is None:
        for key in _OF_RECOMPUTATION:
            if given.get(key):
                value = "selective" if key == "recompute_modules" else "full"
                raise _refused(
                    key, f"does nothing without recompute_granularity; set that to {value}"
                )
    elif granularity == "full":
        _check_full(given, arch, parallel)
    elif granularity == "selective":
        for key in _OF_FULL:
            if given.get(key):
                raise _refused(
                    key, "belongs to recompute_granularity=full; leave it out, or set that"
                )
        _check_modules(given.get("recompute_modules", ["core_attn"]), arch, te_layers)
    else:
        raise _refused("recompute_granularity", f"got {granularity!r}, expected full or selective")


def _check_full(given: Mapping[str, Any], arch: Architecture, parallel: ParallelConfig) -> None:
    """Check the recomputation of whole layers.

    With n `recompute_num_layers`, `uniform` recomputes runs of n layers, and `block` only the first
    n layers of each chunk.
    """
    method = given.get("recompute_method")
    count = given.get("recompute_num_layers")
    if given.get("recompute_modules"):
        raise _refused(
            "recompute_modules",
            "belongs to recompute_granularity=selective; leave it out, or set that",
        )
    if method not in ("uniform", "block"):
        raise _refused("recompute_method", f"got {method!r}, expected uniform or block")
    chunks = {
        layers // parallel.virtual_pipeline
        for layers in layers_of_stages(arch.transformer["num_layers"], parallel)
    }
    most = math.gcd(*chunks) if method == "uniform" else max(chunks)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= max(chunks):
        raise _refused("recompute_num_layers", f"got {count!r}, expected a number from 1 to {most}")
    if method == "uniform" and most % count:
        nearest = max(n for n in range(1, count) if most % n == 0)
        raise _refused(
            "recompute_num_layers",
            f"{count} does not divide the layers of a model chunk"
            f" ({', '.join(map(str, sorted(chunks)))}); set it to {nearest}",
        )
    losses = [key for key in ("moe_aux_loss_coeff", "moe_z_loss_coeff") if given.get(key)]
    if method == "block" and losses and count < max(chunks):
        raise _refused(
            "recompute_method",
            f"block, with {losses[0]}: in layers that are not recomputed megatron-core then counts"
            " pads in the routers' losses; set it to uniform",
        )
    if given.get("distribute_saved_activations") and (parallel.tensor == 1 or parallel.sequence):
        reason = (
            "sequence parallelism does it already"
            if parallel.sequence
            else "there is no tensor parallelism to do it over"
        )
        raise _refused("distribute_saved_activations", f"{reason}; leave it out")


def _check_modules(modules: Any, arch: Architecture, te_layers: bool | None) -> None:
    reasons = {part: _no_recomputation(part, arch, te_layers) for part in _RECOMPUTED_PARTS}
    works = [part for part, reason in reasons.items() if reason is None]
    expected = f"expected some of {', '.join(works)}"
    if not isinstance(modules, list) or not modules:
        raise _refused("recompute_modules", f"got {modules!r}, {expected}")
    for module in modules:
        if module not in _RECOMPUTED_PARTS:
            near = difflib.get_close_matches(str(module), works, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise _refused("recompute_modules", f"got {module!r}, {expected}{hint}")
        if module not in works:
            raise _refused("recompute_modules", f"{module}: {reasons[module]}; {expected}")


def _no_recomputation(module: str, arch: Architecture, te_layers: bool | None) -> str | None:
    """The reason why a part of a layer cannot be recomputed alone; None where it can."""
    experts = bool(arch.num_experts)
    model = arch.transformer
    if module in ("moe", "moe_act") and not experts:
        return f"the {arch.family} model has no experts"
    if module == "mlp" and not any("dense" in kinds for kinds in arch.layer_kinds):
        return f"no layer of the {arch.family} model has a dense MLP"
    if module == "shared_experts" and not model.get("moe_shared_expert_intermediate_size"):
        return f"the {arch.family} model has no shared experts"
    if module == "mla_up_proj":
        return "it has not been proven right"
    if module in ("layernorm", "moe_act") and te_layers is False:
        return "megatron-core needs Transformer Engine's layers for it"
    if module == "layernorm" and not experts:
        return "Transformer Engine's layers have their norms inside the matmuls"
    return None


def _refused(key: str, message: str) -> ConfigError:
    return ConfigError(f"policy.megatron.{key}: {message}")
