"""An architecture whose conversion table comes from another package.

Where we lack the family, its TransformerConfig fields come from there too. They must be fields that
our layers carry; other fields are ours to decide, or refused by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch.nn.functional as F

from backends.megatron.convert.architecture import Architecture, BridgeKind
from backends.megatron.convert.bridges.mbridge import open_mbridge
from backends.megatron.convert.bridges.megatron_bridge import open_megatron_bridge
from backends.megatron.convert.bridges.protocol import PREDICTED_LAYERS, FamilyBridge
from backends.megatron.convert.bridges.table import bridged_entries
from backends.megatron.convert.experts import sigmoid_fields
from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.load import SafetensorsFolder
from backends.megatron.cpu.shim import importing_megatron
from rlcore.errors import ModelError

BRIDGES: dict[str, Callable[[Architecture], FamilyBridge]] = {
    "mbridge": open_mbridge,
    "megatron-bridge": open_megatron_bridge,
}

# Options that change a model and that a bridge may ignore, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "embedding_multiplier": (1,), "residual_multiplier": (1,), "logits_scaling": (1,),
    "logit_scale": (1,), "attention_multiplier": (), "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (), "final_logit_softcapping": (), "clip_qkv": (), "scale_emb": (1,),
    "scale_depth": (), "no_rope_layers": (), "use_mla": (False,),
}  # fmt: skip
_UNREAD = re.compile(r"rotary_emb\.inv_freq$|\.mtp_layers\.|^mtp\.")

# the fields of TransformerConfig that our layers carry
_CARRIED = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "layernorm_epsilon", "qk_layernorm", "add_qkv_bias", "num_moe_experts",
    "moe_ffn_hidden_size", "moe_layer_freq", "moe_router_topk", "moe_router_score_function",
    "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_dtype",
    "moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_intermediate_size",
    "moe_shared_expert_gate",
})  # fmt: skip
# fields with the only value that our layers carry
_EXPECTED: dict[str, Any] = {
    "normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False,
    "activation_func": F.silu,
}  # fmt: skip
# fields that `transformer_config` decides, and losses of pre-training
_OURS = frozenset({
    "params_dtype", "pipeline_dtype", "bf16", "fp16", "autocast_dtype",
    "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "sequence_parallel", "variable_seq_lengths", "overlap_p2p_comm",
    "batch_p2p_comm", "use_cpu_initialization", "perform_initialization", "init_method",
    "output_layer_init_method", "embedding_init_method", "init_method_std",
    "embedding_init_method_std", "hidden_dropout", "attention_dropout", "attention_softmax_in_fp32",
    "attention_backend", "masked_softmax_fusion", "persist_layer_norm", "bias_activation_fusion",
    "bias_dropout_fusion", "apply_rope_fusion", "gradient_accumulation_fusion",
    "cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "transformer_impl",
    "deallocate_pipeline_outputs", "async_tensor_model_parallel_allreduce", "cuda_graph_scope",
    "moe_token_dispatcher_type", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion",
    "moe_shared_expert_overlap", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_z_loss_coeff", "moe_router_bias_update_rate", "mtp_loss_scaling_factor",
    "moe_router_enable_expert_bias",  # belongs to sigmoid routers, see `_router_fields`
})  # fmt: skip
# `read_architecture` has them from config.json
_FROM_CONFIG = ("vocab_size", "max_sequence_length", "rotary_base")


def through_bridge(arch: Architecture, kind: BridgeKind, *, weights: bool) -> Architecture:
    """Return `arch` with the bridge's table.

    A family of ours keeps its configuration, which is tested against transformers; the bridge gives
    that of another family. With `weights`, every tensor of the folder must belong to the model.
    Raises ModelError: the package is missing or does not know the family, or our layers do not
    carry it.
    """
    if arch.latent_attention:
        raise ModelError(
            f"model.bridge: {kind}: {arch.family} has latent attention, which our own table"
            " carries; set none"
        )
    bridge = BRIDGES[kind](arch)
    if arch.family not in FAMILIES:
        arch = _configured(bridge, arch)
    table = replace(arch.table, entries=bridged_entries(bridge, arch))
    arch = replace(arch, bridged=table)
    if weights:
        with SafetensorsFolder(arch.folder) as folder:
            _check_complete(bridge, arch, folder.names)
    return arch


def _configured(bridge: FamilyBridge, arch: Architecture) -> Architecture:
    """Return `arch` with the bridge's fields, and without the layers that are left out."""
    config = arch.hf_config
    for key, neutral in _NEUTRAL.items():
        if (value := config.get(key)) is not None and value not in neutral:
            raise ModelError(
                f"{arch.folder}/config.json: {key}: {value!r} is not known to be in {bridge.name}"
            )
    if kinds := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ModelError(
            f"{arch.folder}/config.json: layer_types: {min(kinds)!r} is not supported, only"
            " 'full_attention'"
        )
    fields = _bridged_fields(bridge, arch)
    rotary = {**(arch.rope_scaling or {}), **_rotary_arguments(bridge)}
    config = {key: 0 if key in PREDICTED_LAYERS else value for key, value in config.items()}
    return replace(arch, transformer=fields, rope_scaling=rotary or None, hf_config=config)


def _bridged_fields(bridge: FamilyBridge, arch: Architecture) -> dict[str, Any]:
    """Read `arch.transformer` of a family that only the bridge knows.

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
    """The fields of our routers beside `carried`.

    Bridges leave them out where Megatron's own router knows only one kind.
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
    """The value of `moe_layer_freq`: for each layer whether it has experts, or 1 where all have."""
    pattern = (
        every
        if isinstance(every, list)
        else [int(layer % every == 0) for layer in range(num_layers)]
    )
    return 1 if all(pattern) else [int(has) for has in pattern]


def _rotary_arguments(bridge: FamilyBridge) -> dict[str, Any]:
    """The keyword arguments of `GPTModel` for rotary positions that `config.json` does not tell.

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


def _check_complete(bridge: FamilyBridge, arch: Architecture, names: Iterable[str]) -> None:
    """Refuse a folder with a tensor that the model does not compute with."""
    known = {name for entry in arch.entries() for name in entry.hf} | {"lm_head.weight"}
    predicted = tuple(
        f"model.layers.{layer}." for layer in range(arch.num_layers, arch.num_layers + 8)
    )
    for name in sorted(set(names) - known):
        if not _UNREAD.search(name) and not name.startswith(predicted):
            raise ModelError(
                f"{arch.folder}: tensor {name!r} has no place in the model that {bridge.name}"
                " describes"
            )
