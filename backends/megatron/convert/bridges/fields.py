"""Which TransformerConfig fields of a bridge our layers carry; what else it sets is ours to decide,
or refused by name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.bridges.protocol import FamilyBridge
from backends.megatron.convert.experts import sigmoid_fields
from backends.megatron.cpu.shim import importing_megatron
from rlcore.errors import ModelError

_CARRIED = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "layernorm_epsilon", "qk_layernorm", "add_qkv_bias", "num_moe_experts", "moe_ffn_hidden_size", "moe_layer_freq",
    "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor",
    "moe_router_dtype", "moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
})  # fmt: skip
_EXPECTED: dict[str, Any] = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "activation_func": F.silu,
}  # fmt: skip
# How a step is computed, which `transformer_config` decides, and losses of pre-training.
_OURS = frozenset({
    "params_dtype", "pipeline_dtype", "bf16", "fp16", "autocast_dtype", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel", "variable_seq_lengths",
    "overlap_p2p_comm", "batch_p2p_comm", "use_cpu_initialization", "perform_initialization", "init_method",
    "output_layer_init_method", "embedding_init_method", "init_method_std", "embedding_init_method_std", "hidden_dropout",
    "attention_dropout", "attention_softmax_in_fp32", "attention_backend", "masked_softmax_fusion", "persist_layer_norm",
    "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion", "gradient_accumulation_fusion",
    "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "transformer_impl", "deallocate_pipeline_outputs",
    "async_tensor_model_parallel_allreduce", "cuda_graph_scope", "moe_token_dispatcher_type", "moe_grouped_gemm",
    "moe_permute_fusion", "moe_router_fusion", "moe_shared_expert_overlap", "moe_router_load_balancing_type",
    "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "mtp_loss_scaling_factor",
    "moe_router_enable_expert_bias",        # goes with sigmoid routers, see `_router_fields`
})  # fmt: skip
# `read_architecture` has them from config.json
_FROM_CONFIG = ("vocab_size", "max_sequence_length", "rotary_base")


def bridged_fields(bridge: FamilyBridge, arch: Architecture) -> dict[str, Any]:
    """`arch.transformer` of a family that only the bridge knows.

    Raises ModelError naming the first field that our layers do not carry.
    """
    with importing_megatron():
        from megatron.core.transformer import TransformerConfig
    defaults = {
        f.name: f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        for f in dataclasses.fields(TransformerConfig)
    }
    carried: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    given = dict(bridge.fields())
    # layers that predict further tokens: Megatron says None for none
    if given.get("mtp_num_layers") == 0:
        del given["mtp_num_layers"]
    for name, value in given.items():
        if name in _CARRIED:
            carried |= {name: value} if value is not None else {}
        elif name in _EXPECTED:
            if value != _EXPECTED[name]:
                raise ModelError(
                    f"{bridge.name} sets {name} to {value!r}; our layers have {_EXPECTED[name]!r}"
                    " alone"
                )
            carried |= {name: value} if name != "activation_func" else {}
        elif name not in _OURS and value != defaults.get(name):
            raise ModelError(
                f"{bridge.name} sets {name} to {value!r}, which our layers do not carry; the family"
                " needs its own"
            )
    if missing := sorted((_EXPECTED.keys() - {"activation_func"}) - carried.keys()):
        raise ModelError(
            f"{bridge.name} leaves {missing[0]} to Megatron's default; our layers have"
            f" {_EXPECTED[missing[0]]!r}"
        )
    if carried.get("num_moe_experts"):
        carried["moe_layer_freq"] = _layer_pattern(
            carried.get("moe_layer_freq", 1), arch.num_layers
        )
        carried |= _router_fields(bridge, arch, carried)
        return carried
    return {name: value for name, value in carried.items() if not name.startswith("moe_")}


def _router_fields(
    bridge: FamilyBridge, arch: Architecture, carried: dict[str, Any]
) -> dict[str, Any]:
    """What our routers are told beside `carried`: bridges leave it out where Megatron's own router
    has one answer alone.
    """
    config = arch.hf_config
    score = carried.get("moe_router_score_function", "softmax")
    bias = bool(bridge.fields().get("moe_router_enable_expert_bias"))
    if score == "sigmoid" and bias:
        normalized = bool(config.get("norm_topk_prob", True))
        return {
            **sigmoid_fields(arch.folder, config, carried["num_moe_experts"]),
            "moe_router_pre_softmax": not normalized,
        }
    if score != "softmax" or bias:
        raise ModelError(
            f"{bridge.name}: {score} routers {'with' if bias else 'without'} a bias are not"
            " supported"
        )
    normalized = not carried.get("moe_router_pre_softmax", False)
    if bool(config.get("norm_topk_prob", normalized)) != normalized or config.get(
        "n_group"
    ) not in (None, 1):
        raise ModelError(
            f"{bridge.name} passes over norm_topk_prob {config.get('norm_topk_prob')} or n_group"
            f" {config.get('n_group')} of {arch.folder}/config.json: its routers would be other"
            " ones"
        )
    return {}


def _layer_pattern(every: int | list[int], num_layers: int) -> int | list[int]:
    """Which layers have experts; 1 where all have."""
    pattern = (
        every
        if isinstance(every, list)
        else [int(layer % every == 0) for layer in range(num_layers)]
    )
    return 1 if all(pattern) else [int(has) for has in pattern]


def rotary_arguments(bridge: FamilyBridge) -> dict[str, Any]:
    """What `config.json` alone did not tell of the rotary positions, as keyword arguments of
    `GPTModel`.

    Raises ModelError for an argument of `GPTModel` that our builder does not pass on.
    """
    given = {key: value for key, value in bridge.gpt_arguments().items() if key not in _FROM_CONFIG}
    if (kind := given.pop("position_embedding_type", "rope")) != "rope":
        raise ModelError(
            f"{bridge.name}: position_embedding_type {kind!r} is not supported, expected 'rope'"
        )
    percent = float(given.pop("rotary_percent", 1.0))
    if given:
        raise ModelError(f"{bridge.name}: GPTModel's {min(given)} is not supported")
    return {} if percent == 1.0 else {"rotary_percent": percent}
