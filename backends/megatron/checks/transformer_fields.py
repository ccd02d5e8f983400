"""Checks of the TransformerConfig fields that `policy.megatron` sets.

A field may change how a step is computed, never the result of the step.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer import TransformerConfig

from backends.megatron.convert.architecture import Architecture
from rlcore.errors import ConfigError

INIT_METHODS = ("init_method", "output_layer_init_method", "embedding_init_method")
FUSIONS = (
    "gradient_accumulation_fusion", "masked_softmax_fusion", "apply_rope_fusion",
    "persist_layer_norm", "bias_activation_fusion", "bias_dropout_fusion",
)  # fmt: skip

_MODEL = "the model folder decides it"
_NO_TE = "it needs Transformer Engine, Apex or other kernels that this layer spec does not use"
_SCHEDULE = "packed sequences and weighted losses depend on it"
_P2P = (
    "it follows from the pipeline schedule: batched transfers are ambiguous where two stages"
    " exchange several chunks (pipeline 2 with virtual_pipeline > 1), and the gradients come out"
    " wrong without a word; leave it out"
)
_ATTENTION = "the packed attention does not have it, so it would do nothing"
_NOT_YET = "not available yet"
_DENSE = "the model has no experts"
_LOSSES = ("moe_aux_loss_coeff", "moe_z_loss_coeff")

# reason -> fields that are refused for it
REFUSED: dict[str, tuple[str, ...]] = {
    "set it under policy.parallel": (
        "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size", "context_parallel_size",
        "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel",
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    "set model.dtype": (
        "params_dtype", "pipeline_dtype", "bf16", "fp16", "autocast_dtype", "enable_autocast"),
    "dropout is off: it would make noise of the ratio between two policies": (
        "hidden_dropout", "attention_dropout"),
    "weights come from a model folder": (
        *INIT_METHODS, "init_method_std", "embedding_init_method_std", "perform_initialization",
        "use_cpu_initialization", "init_model_with_meta_device"),
    _SCHEDULE: (
        "calculate_per_token_loss", "variable_seq_lengths", "deallocate_pipeline_outputs",
        "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func",
        "param_sync_func", "timers", "overlap_p2p_comm_warmup_flush", "use_ring_exchange_p2p"),
    _P2P: ("overlap_p2p_comm", "batch_p2p_comm"),
    _MODEL: (
        "activation_func", "activation_func_clamp_value", "glu_linear_offset", "rotary_interleaved",
        "no_rope_freq", "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm",
        "qk_l2_norm", "attention_output_gate", "softmax_scale", "experimental_attention_variant",
        "multi_latent_attention", "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq",
        "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax",
        "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
        "moe_router_topk_limited_devices", "moe_router_enable_expert_bias",
        "moe_router_bias_update_rate", "moe_shared_expert_intermediate_size",
        "moe_shared_expert_gate", "moe_apply_probs_on_input", "moe_latent_size"),
    "a token's experts would depend on the tokens beside it, and so would its log-prob": (
        "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity", "moe_token_dropping",
        "moe_token_drop_policy", "moe_router_force_load_balancing"),
    "it would make noise of the ratio between two policies": ("moe_input_jitter_eps",),
    "the auxiliary loss is that of a micro-batch; its coefficient is moe_aux_loss_coeff": (
        "moe_router_load_balancing_type",),
    "train/moe_aux_loss and train/moe_z_loss are the mean over the layers": (
        "moe_per_layer_logging",),
    "set policy.routing_replay": ("moe_enable_routing_replay",),
    _ATTENTION: (
        "window_size", "window_attn_skip_freq", "softmax_type", "qk_clip",
        "apply_query_key_layer_scaling", "attention_softmax_in_fp32", "attention_backend",
        "flash_decode"),
    _NO_TE: (
        *FUSIONS, "memory_efficient_layer_norm", "fused_single_qkv_rope", "use_te_rng_tracker",
        "use_te_activation_func", "transformer_impl", "cpu_offloading", "delay_wgrad_compute",
        "enable_cuda_graph", "external_cuda_graph", "use_kitchen",
        "fine_grained_activation_offloading", "symmetric_ar_type", "moe_grouped_gemm",
        "moe_permute_fusion", "moe_use_legacy_grouped_gemm", "moe_router_fusion",
        "moe_enable_deepep", "moe_flex_dispatcher_backend", "moe_deepep_num_sms",
        "moe_hybridep_num_sms", "moe_router_padding_for_quantization",
        "moe_router_padding_for_fp8"),
    _NOT_YET: ("hybrid_context_parallel", "cp_comm_type", "pipeline_model_parallel_layout"),
}  # fmt: skip

# prefix of field names -> the reason for which all such fields are refused
_REFUSED_FAMILIES = {
    "mtp_": _NOT_YET, "linear_": _NOT_YET, "dsa_": _NOT_YET, "mamba_": _NOT_YET,
    "heterogeneous": _NOT_YET, "fp8": "set policy.fp8, which needs Transformer Engine",
    "fp4": _NO_TE, "tp_comm_": _NO_TE, "cuda_graph": _NO_TE,
}  # fmt: skip


def check_overrides(overrides: Mapping[str, Any], arch: Architecture) -> None:
    """Refuse unknown fields, fields that something else decides, and fields that do nothing.

    Raises ConfigError naming the key, and the nearest field or the reason.
    """
    fields = {f.name for f in dataclasses.fields(TransformerConfig) if f.init}
    for key in overrides:
        if key not in fields:
            nearest = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(
                f"policy.megatron.{key}: megatron.core's TransformerConfig has no such field{hint}"
            )
        reason = _reason(key, arch)
        if reason:
            raise ConfigError(f"policy.megatron.{key}: cannot be set here: {reason}")
        if key in _LOSSES and not isinstance(overrides[key], (int, float)):
            raise ConfigError(f"policy.megatron.{key}: got {overrides[key]!r}, expected a number")


def _reason(key: str, arch: Architecture) -> str | None:
    for reason, fields in REFUSED.items():
        if key in fields:
            return reason
    if key in arch.transformer:
        return _MODEL
    if key.startswith("moe_") and not arch.num_experts:
        return _DENSE
    return next(
        (reason for start, reason in _REFUSED_FAMILIES.items() if key.startswith(start)), None
    )
