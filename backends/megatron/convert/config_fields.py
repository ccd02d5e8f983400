"""The fields of `config.json` that the conversion reads: their types, and each family's defaults.

Types and defaults are those of transformers' configuration classes. A size that every model must
give has no default here. A field that would change the model in a way that is not converted accepts
`only` one value.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlcore.hf_config.fields import Field
from rlcore.hf_config.language import DEFAULT_SIZES

_SIZE = Field("size")
_OTHER_SIZE = Field("size", None, nullable=True)
_ABSENT = Field("map", None, nullable=True, only=None)
_OFF = Field("flag", False, only=False)
# The default is ignored if an alias is given; one of the names must be given.
_COUNT_OF_EXPERTS = Field("size", None)

_COMMON = {
    "architectures": Field("texts", None, nullable=True),
    "problem_type": Field("text", None, nullable=True),
    "num_labels": Field("size", None),
    "id2label": Field("map", None, nullable=True),
    "vocab_size": _SIZE,
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _SIZE,
    "num_attention_heads": _SIZE,
    # null: the number of attention heads.
    "num_key_value_heads": _OTHER_SIZE,
    # null: hidden_size / num_attention_heads.
    "head_dim": _OTHER_SIZE,
    "max_position_embeddings": _SIZE,
    # transformers prefers it to the setting of the same name in `rope_parameters`.
    "original_max_position_embeddings": Field("size", None),
    "rms_norm_eps": Field("float", 1e-6),
    "tie_word_embeddings": Field("flag", False),
    "hidden_act": Field("text", "silu", only="silu"),
    "attention_bias": _OFF,
    "mlp_bias": _OFF,
    "use_sliding_window": _OFF,
    # transformers writes 0 for a Qwen2-MoE that does not use its window.
    "sliding_window": Field("count", None, nullable=True),
    "layer_types": Field("texts", None, nullable=True),
    "per_layer_config": _ABSENT,
    "quantization_config": _ABSENT,
    "compression_config": _ABSENT,
    "rope_theta": Field("number", 10000.0),
    "rope_scaling": Field("map", None, nullable=True),
    "rope_parameters": Field("map", None, nullable=True),
    "partial_rotary_factor": Field("number", 1.0, nullable=True, only=1.0),
}
ARCHITECTURES = {"architectures": _COMMON["architectures"]}

LLAMA: Mapping[str, Field] = _COMMON
QWEN2: Mapping[str, Field] = {
    **_COMMON,
    "num_key_value_heads": Field("size", 32, nullable=True),
    "head_dim": Field("size", None),
}
MIMO: Mapping[str, Field] = {**QWEN2, "attention_bias": Field("flag", True, only=True)}
QWEN3: Mapping[str, Field] = {**QWEN2, "head_dim": Field("size", 128)}

_QWEN_MOE = {
    **QWEN2,
    "num_experts": _COUNT_OF_EXPERTS,
    "num_experts_per_tok": _SIZE,
    "moe_intermediate_size": _SIZE,
    "norm_topk_prob": Field("flag", False),
    "decoder_sparse_step": Field("size", 1),
    "mlp_only_layers": Field("counts", None, nullable=True),
}
QWEN2_MOE: Mapping[str, Field] = {
    **_QWEN_MOE,
    "num_key_value_heads": Field("size", 16),
    "shared_expert_intermediate_size": _SIZE,
    "qkv_bias": Field("flag", True, only=True),
}
QWEN3_MOE: Mapping[str, Field] = {
    **_QWEN_MOE,
    "num_key_value_heads": Field("size", 4),
    "num_local_experts": _COUNT_OF_EXPERTS,
}
# Whose configurations cannot disable a window that they give.
_WITH_WINDOW = {key: field for key, field in _COMMON.items() if key != "use_sliding_window"}
MIXTRAL: Mapping[str, Field] = {
    **_WITH_WINDOW,
    "num_key_value_heads": Field("size", 8),
    "rms_norm_eps": Field("float", 1e-5),
    "rope_theta": Field("number", 1e6),
    "num_local_experts": _COUNT_OF_EXPERTS,
    "num_experts": _COUNT_OF_EXPERTS,
    "num_experts_per_tok": _SIZE,
}

# Routers that choose among the experts of the best groups, and their experts.
_SIGMOID_ROUTER = {
    "num_experts_per_tok": _SIZE,
    "norm_topk_prob": Field("flag", True),
    "scoring_func": Field("text", "sigmoid", only="sigmoid"),
    "topk_method": Field("text", "noaux_tc", only="noaux_tc"),
    "moe_layer_freq": Field("size", 1, only=1),
    "n_group": _SIZE,
    "topk_group": _SIZE,
    "routed_scaling_factor": Field("float"),
    "n_routed_experts": _COUNT_OF_EXPERTS,
    "num_local_experts": _COUNT_OF_EXPERTS,
    "n_shared_experts": _SIZE,
    "moe_intermediate_size": _SIZE,
}
DEEPSEEK_V3: Mapping[str, Field] = {
    **_COMMON,
    **_SIGMOID_ROUTER,
    "num_key_value_heads": Field("size", 128, nullable=True),
    "head_dim": Field("size", None),
    "first_k_dense_replace": Field("count", 3),
    "q_lora_rank": Field("size", nullable=True),
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": _SIZE,
    "qk_rope_head_dim": _SIZE,
    "v_head_dim": _SIZE,
    "rope_interleave": Field("flag", True),
}
GLM4_MOE: Mapping[str, Field] = {
    **_COMMON,
    **_SIGMOID_ROUTER,
    "num_key_value_heads": Field("size", 8),
    "head_dim": Field("size", None),
    "rms_norm_eps": Field("float", 1e-5),
    "attention_bias": Field("flag", False),
    "use_qk_norm": Field("flag", False),
    "partial_rotary_factor": Field("number", 0.5),
    "routed_scaling_factor": Field("float", 1.0),
    "n_group": Field("size", 1),
    "topk_group": Field("size", 1),
    "n_shared_experts": Field("size", 1),
    "first_k_dense_replace": Field("count", 1),
}

# Sparse attention, which is dense up to `index_topk` tokens.
DEEPSEEK_V32: Mapping[str, Field] = {
    **DEEPSEEK_V3,
    "q_lora_rank": _SIZE,
    "num_key_value_heads": Field("size", 128),
    "rope_interleave": Field("flag", True, only=True),
    "mlp_layer_types": Field("texts", None, nullable=True),
    "index_topk": Field("size", 2048),
}
GLM_MOE_DSA: Mapping[str, Field] = {
    **DEEPSEEK_V32,
    "num_key_value_heads": Field("size", 64),
    "rms_norm_eps": Field("float", 1e-5),
}
MINIMAX_M2: Mapping[str, Field] = {
    **_COMMON,
    "num_key_value_heads": Field("size", 8),
    "head_dim": Field("size", 128),
    "rope_theta": Field("number", 5e6),
    # Another spelling of `partial_rotary_factor`, in dimensions of a head.
    "rotary_dim": Field("size", None, nullable=True),
    "partial_rotary_factor": Field("number", 1.0),
    "num_local_experts": _COUNT_OF_EXPERTS,
    "num_experts": _COUNT_OF_EXPERTS,
    "num_experts_per_tok": _SIZE,
    "scoring_func": Field("text", "sigmoid", only="sigmoid"),
    "use_qk_norm": Field("flag", True, only=True),
    "qk_norm_type": Field("text", "per_layer", only="per_layer"),
    "use_routing_bias": Field("flag", True, only=True),
    "shared_intermediate_size": Field("count", 0, only=0),
    "n_group": Field("size", 1, only=1),
    "topk_group": Field("size", 1, only=1),
    "routed_scaling_factor": Field("float", 1.0, only=1.0),
}

GPT_OSS: Mapping[str, Field] = {
    **_COMMON,
    # Where neither spelling is given.
    "rope_parameters": Field(
        "map",
        {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        nullable=True,
    ),
    "num_key_value_heads": Field("size", 8),
    "head_dim": Field("size", 64),
    "rms_norm_eps": Field("float", 1e-5),
    "attention_bias": Field("flag", True, only=True),
    "sliding_window": Field("size", 128),
    "rope_theta": Field("number", 150000.0),
    "num_local_experts": _COUNT_OF_EXPERTS,
    "num_experts": _COUNT_OF_EXPERTS,
    "num_experts_per_tok": Field("size", 4),
    # Megatron's quick_gelu has this constant.
    "swiglu_alpha": Field("float", 1.702, only=1.702),
    "swiglu_limit": Field("float", 7.0),
    # Weights in MXFP4.
    "quantization_config": Field("map", None, nullable=True),
}
_NO_CAP = Field("number", None, nullable=True, only=None)
GEMMA3_TEXT: Mapping[str, Field] = {
    **{key: field for key, field in _COMMON.items() if key != "hidden_act"},
    "hidden_activation": Field("text", "gelu_pytorch_tanh", only="gelu_pytorch_tanh"),
    "num_key_value_heads": Field("size", 4),
    "head_dim": Field("size", 256),
    "tie_word_embeddings": Field("flag", True),
    "query_pre_attn_scalar": Field("size", 256),
    "sliding_window": Field("size", 4096),
    "sliding_window_pattern": Field("size", 6),
    "rope_theta": Field("number", 1e6),
    "rope_local_base_freq": Field("number", 10000.0),
    "final_logit_softcapping": _NO_CAP,
    "attn_logit_softcapping": _NO_CAP,
    "use_bidirectional_attention": Field("flag", False, nullable=True, only=False),
}
GEMMA3: Mapping[str, Field] = {
    **GEMMA3_TEXT,
    **{key: Field("size", size) for key, size in DEFAULT_SIZES["gemma3"].items()},
}
GEMMA4_TEXT: Mapping[str, Field] = {
    **{key: field for key, field in _COMMON.items() if key != "hidden_act"},
    "hidden_activation": Field("text", "gelu_pytorch_tanh", only="gelu_pytorch_tanh"),
    "num_key_value_heads": Field("size", 4),
    "head_dim": Field("size", 256),
    "tie_word_embeddings": Field("flag", True),
    "sliding_window": Field("size", 512),
    # Where neither spelling is given.
    "rope_parameters": Field(
        "map",
        {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1000000.0,
            },
        },
        nullable=True,
    ),
    "partial_rotary_factor": Field("number", 1.0),
    "final_logit_softcapping": Field("number", None, nullable=True),
    "attention_k_eq_v": Field("flag", False, only=True),
    "global_head_dim": Field("size", 512),
    "num_global_key_value_heads": Field("size", None, nullable=True),
    # transformers writes the two there, for each layer without a window.
    "per_layer_config": Field("map", None, nullable=True),
    # "vision": images alone.
    "use_bidirectional_attention": Field("text", None, nullable=True),
    "hidden_size_per_layer_input": Field("count", 256, only=0),
    "num_kv_shared_layers": Field("count", 0, only=0),
    "use_double_wide_mlp": _OFF,
    "enable_moe_block": _OFF,
}

OLMO3: Mapping[str, Field] = {
    **_COMMON,
    "rms_norm_eps": Field("float", 1e-5),
    "sliding_window": Field("size", 4096),
    "rope_theta": Field("number", 500000.0),
    # The base in layers with windows, without a set of their own, whatever `rope_theta` is.
    "rope_local_base_freq": Field("number", 500000.0, only=500000.0),
}

MISTRAL: Mapping[str, Field] = {
    **_WITH_WINDOW,
    "num_key_value_heads": Field("size", 8),
    "sliding_window": Field("count", 4096, nullable=True),
}
MINISTRAL3: Mapping[str, Field] = {
    **_WITH_WINDOW,
    "num_key_value_heads": Field("size", 8),
    "head_dim": Field("size", 128),
    "rms_norm_eps": Field("float", 1e-5),
    # Where neither spelling is given.
    "rope_parameters": Field(
        "map",
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        nullable=True,
    ),
}
SEED_OSS: Mapping[str, Field] = {
    **_COMMON,
    "num_key_value_heads": Field("size", 8, nullable=True),
    "head_dim": Field("size", 128, nullable=True),
    "attention_bias": Field("flag", True),
    "attention_out_bias": _OFF,
}
SMOLLM3: Mapping[str, Field] = {
    **_COMMON,
    "num_key_value_heads": Field("size", 4, nullable=True),
    "head_dim": Field("size", None),
    "rope_theta": Field("number", 2e6),
    "tie_word_embeddings": Field("flag", True),
    # 1 for a layer with rotary positions, 0 for one without; null: every n-th has none.
    "no_rope_layers": Field("counts", None, nullable=True),
    "no_rope_layer_interval": Field("size", 4),
}
GLM4_MOE_LITE: Mapping[str, Field] = {
    **DEEPSEEK_V3,
    "num_key_value_heads": Field("size", 20),
    "rms_norm_eps": Field("float", 1e-5),
    "routed_scaling_factor": Field("float", 1.8),
    "n_group": Field("size", 1),
    "topk_group": Field("size", 1),
    "n_shared_experts": Field("size", 1),
    # transformers goes by this list alone; null: the first layer is dense.
    "mlp_layer_types": Field("texts", None, nullable=True),
    "first_k_dense_replace": Field("count", 1, only=1),
}

# A setting of rotary positions by which queries grow with their position.
SCALED_QUERIES: Mapping[str, Field] = {"llama_4_scaling_beta": Field("scale")}
_GATED_DELTA = {
    "head_dim": Field("size", 256),
    "partial_rotary_factor": Field("number", 0.25),
    # Ignored where `layer_types` is given.
    "full_attention_interval": Field("size", 4),
    "linear_conv_kernel_dim": Field("size", 4),
    "linear_key_head_dim": Field("size", 128),
    "linear_value_head_dim": Field("size", 128),
    "linear_num_key_heads": Field("size", 16),
    "linear_num_value_heads": Field("size", 32),
}
QWEN3_NEXT: Mapping[str, Field] = {
    **_QWEN_MOE,
    **_GATED_DELTA,
    "num_key_value_heads": Field("size", 2),
    "shared_expert_intermediate_size": _SIZE,
    "norm_topk_prob": Field("flag", True),
}
QWEN3_5: Mapping[str, Field] = {**_COMMON, **_GATED_DELTA, "num_key_value_heads": Field("size", 4)}
QWEN3_5_MOE: Mapping[str, Field] = {
    **_COMMON,
    **_GATED_DELTA,
    # Every layer has experts.
    "intermediate_size": Field("size", None, nullable=True),
    "num_key_value_heads": Field("size", 2),
    "num_experts": _COUNT_OF_EXPERTS,
    "num_experts_per_tok": _SIZE,
    "moe_intermediate_size": _SIZE,
    "shared_expert_intermediate_size": _SIZE,
}

NEMOTRON_H: Mapping[str, Field] = {
    **{key: _COMMON[key] for key in (
        "architectures", "problem_type", "num_labels", "id2label", "vocab_size", "hidden_size",
        "num_attention_heads", "max_position_embeddings", "attention_bias", "mlp_bias",
        "sliding_window", "per_layer_config", "quantization_config", "compression_config",
    )},
    # transformers does not tie embeddings of this family, whatever the field says.
    "tie_word_embeddings": _OFF,
    # The type of each layer, in one of two spellings: a list, or a letter for each.
    "layers_block_type": Field("texts", None, nullable=True),
    "hybrid_override_pattern": Field("text", None),
    # transformers' other name of the list.
    "layer_types": Field("texts", None, only=None),
    # transformers ignores it and counts the layers' types.
    "num_hidden_layers": Field("size", None, nullable=True),
    "intermediate_size": Field("size", 21504),
    "num_key_value_heads": Field("size", 8),
    "head_dim": Field("size", 128),
    "layer_norm_epsilon": Field("float", 1e-5),
    "mlp_hidden_act": Field("text", "relu2", only="relu2"),
    "mamba_hidden_act": Field("text", "silu", only="silu"),
    "use_bias": _OFF,
    "mamba_proj_bias": _OFF,
    "use_conv_bias": Field("flag", True, only=True),
    "mamba_num_heads": Field("size", 128),
    "mamba_head_dim": Field("size", 64),
    "n_groups": Field("size", 8),
    "ssm_state_size": Field("size", 128),
    "conv_kernel": Field("size", 4),
    "n_routed_experts": Field("size", 8),
    "num_local_experts": _COUNT_OF_EXPERTS,
    "num_experts_per_tok": Field("size", 2),
    "moe_intermediate_size": Field("size", 7688),
    "moe_shared_expert_intermediate_size": Field("size", 7688),
    "moe_latent_size": Field("size", None, nullable=True, only=None),
    "n_group": Field("size", 1),
    "topk_group": Field("size", 1),
    "norm_topk_prob": Field("flag", True),
    "routed_scaling_factor": Field("number", 1.0),
}  # fmt: skip

# The kinds of `rope_scaling` and `rope_parameters`. transformers ignores what is not listed here.
_ROPE = {"rope_type": Field("text", "default"), "rope_theta": Field("number", 10000.0)}
_SCALED = {**_ROPE, "factor": Field("number")}
ROPE: Mapping[str, Mapping[str, Field]] = {
    "default": _ROPE,
    "linear": _SCALED,
    # Of all pairs of a head only the first turn.
    "proportional": {**_ROPE, "factor": Field("number", 1.0)},
    "llama3": {
        **_SCALED,
        "low_freq_factor": Field("number"),
        "high_freq_factor": Field("number"),
        "original_max_position_embeddings": _SIZE,
    },
    "yarn": {
        **_SCALED,
        "original_max_position_embeddings": _SIZE,
        "attention_factor": Field("number", None, nullable=True),
        "truncate": Field("flag", True),
        "beta_fast": Field("number", 32.0, nullable=True),
        "beta_slow": Field("number", 1.0, nullable=True),
        "mscale": Field("scale", None, nullable=True),
        "mscale_all_dim": Field("scale", None, nullable=True),
    },
    "longrope": {
        **_ROPE,
        # null: max_position_embeddings / original_max_position_embeddings.
        "factor": Field("number", None, nullable=True),
        "original_max_position_embeddings": _SIZE,
        "attention_factor": Field("number", None, nullable=True),
        "short_factor": Field("numbers"),
        "long_factor": Field("numbers"),
    },
}
