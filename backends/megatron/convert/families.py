"""The families that we convert: the table of each, and facts that its `config.json` leaves out.

To add a family, write its table here and add it to `FAMILIES`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backends.megatron.convert import config_fields
from backends.megatron.convert.table import (
    OUTPUT_LAYER,
    VALUE_HEAD,
    WORD_EMBEDDING,
    Entry,
    Experts,
    Family,
    Part,
    PredictionLayer,
    Split,
)

_M = "decoder.layers.{layer}."
_H = "model.layers.{layer}."
_ATTENTION_M = _M + "self_attention."
_ATTENTION_H = _H + "self_attn."


def _gated(
    megatron: str,
    hf: str,
    layers: str,
    width: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Entry, Entry]:
    """A gated feed-forward net; `names` are its gate, up and down projections."""
    gate, up, down = (f"{hf}{name}.weight" for name in names)
    wide = tuple(Part(name, (width, "hidden")) for name in (gate, up))
    return (
        Entry(megatron + "linear_fc1.weight", wide, Split.STACKED, layers),
        Entry(megatron + "linear_fc2.weight", (Part(down, ("hidden", width)),), Split.ROW, layers),
    )


def _whole(
    megatron: str, hf: str, *shape: str, split: Split = Split.REPLICATED, **options: Any
) -> Entry:
    """The row of one tensor."""
    return Entry(megatron, (Part(hf, shape),), split, **options)


def _qkv(kind: str, *tail: str, where: str | None = None) -> Entry:
    """The row of three projections, or of their biases."""
    return Entry(
        _ATTENTION_M + f"linear_qkv.{kind}",
        tuple(
            Part(_ATTENTION_H + f"{name}_proj.{kind}", (rows, *tail))
            for name, rows in (("q", "query"), ("k", "key"), ("v", "key"))
        ),
        Split.QKV,
        where=where,
    )


# Everything except the feed-forward nets.
TRUNK = (
    _whole(WORD_EMBEDDING, "model.embed_tokens.weight", "vocab", "hidden", split=Split.VOCAB),
    _whole(_M + "input_layernorm.weight", _H + "input_layernorm.weight", "hidden"),
    _qkv("weight", "hidden"),
    _whole(
        _ATTENTION_M + "linear_proj.weight",
        _ATTENTION_H + "o_proj.weight",
        "hidden",
        "attended",
        split=Split.ROW,
    ),
    _whole(_M + "pre_mlp_layernorm.weight", _H + "post_attention_layernorm.weight", "hidden"),
    _whole("decoder.final_layernorm.weight", "model.norm.weight", "hidden"),
    _whole(OUTPUT_LAYER, "lm_head.weight", "vocab", "hidden", split=Split.VOCAB),
    _whole(VALUE_HEAD, "score.weight", "one", "hidden"),
)
_DENSE = (*TRUNK, *_gated(_M + "mlp.", _H + "mlp.", "dense", "ffn"))

_QKV_BIAS = _qkv("bias", where="add_qkv_bias")
_QK_NORM = tuple(
    _whole(
        _ATTENTION_M + f"{name}_layernorm.weight",
        _ATTENTION_H + f"{name}_norm.weight",
        "head",
        where="qk_layernorm",
    )
    for name in ("q", "k")
)


def _routed(module: str, names: tuple[str, str, str]) -> tuple[Entry, ...]:
    """A router and its experts; `names` as in `_gated`."""
    expert = _M + "mlp.experts.local_experts.{expert}."
    return (
        _whole(
            _M + "mlp.router.weight", _H + module + "gate.weight", "experts", "hidden", layers="moe"
        ),
        *_gated(expert, _H + module + "experts.{expert}.", "moe", "expert_ffn", names),
    )


_EXPERTS = _routed("mlp.", ("gate_proj", "up_proj", "down_proj"))

LLAMA = Family(model_type="llama", class_prefix="Llama", entries=_DENSE, fields=config_fields.LLAMA)

# Qwen2 and Qwen2.5: Llama with a bias on Q, K and V.
QWEN2 = Family(
    model_type="qwen2",
    class_prefix="Qwen2",
    entries=(*_DENSE, _QKV_BIAS),
    fields=config_fields.QWEN2,
    qkv_bias=True,
)

# MiMo: Qwen2 with layers that predict further tokens.
MIMO = replace(
    QWEN2,
    model_type="mimo",
    class_prefix="MiMo",
    fields=config_fields.MIMO,
    carried=(r"model\.mtp_layers\.",),
    known_as="qwen2",
    prediction=PredictionLayer(
        prefix="model.mtp_layers.0.",
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        final_norm="final_layernorm",
        hidden_first=True,
    ),
)

# Qwen3 (dense): Llama with an RMSNorm on each head's Q and K.
QWEN3 = Family(
    model_type="qwen3",
    class_prefix="Qwen3",
    entries=(*_DENSE, *_QK_NORM),
    fields=config_fields.QWEN3,
    qk_norm=True,
)

# Qwen2-MoE and Qwen1.5-MoE: Qwen2 with routed experts, and a gated expert for every token.
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    class_prefix="Qwen2Moe",
    entries=(
        *QWEN2.entries,
        *_EXPERTS,
        *_gated(_M + "mlp.shared_experts.", _H + "mlp.shared_expert.", "moe", "shared_ffn"),
        _whole(
            _M + "mlp.shared_experts.gate_weight",
            _H + "mlp.shared_expert_gate.weight",
            "one",
            "hidden",
            layers="moe",
        ),
    ),
    fields=config_fields.QWEN2_MOE,
    qkv_bias=True,
    experts=Experts(
        count=("num_experts",),
        width="moe_intermediate_size",
        normalized="norm_topk_prob",
        shared_width="shared_expert_intermediate_size",
    ),
)

# Qwen3-MoE: Qwen3 with routed experts in all layers, or in some.
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    class_prefix="Qwen3Moe",
    entries=(*QWEN3.entries, *_EXPERTS),
    fields=config_fields.QWEN3_MOE,
    qk_norm=True,
    experts=Experts(
        count=("num_experts", "num_local_experts"),
        width="moe_intermediate_size",
        normalized="norm_topk_prob",
    ),
)

# Mixtral: Llama with routed experts in every layer.
MIXTRAL = Family(
    model_type="mixtral",
    class_prefix="Mixtral",
    entries=(*TRUNK, *_routed("block_sparse_moe.", ("w1", "w3", "w2"))),
    fields=config_fields.MIXTRAL,
    experts=Experts(
        count=("num_local_experts", "num_experts"), width="intermediate_size", normalized=True
    ),
)


def _low_rank(
    megatron: str, hf: str, *shape: str, split: Split = Split.COLUMN, **options: Any
) -> Entry:
    return _whole(_ATTENTION_M + megatron, _ATTENTION_H + hf, *shape, split=split, **options)


_WITH_LOW_QUERY: dict[str, Any] = {"where": "q_lora_rank"}
_LATENT_ATTENTION = (
    _low_rank("linear_q_proj.weight", "q_proj.weight", "query", "hidden", unless="q_lora_rank"),
    _low_rank("linear_q_down_proj.weight", "q_a_proj.weight", "q_low", "hidden", **_WITH_LOW_QUERY),
    _low_rank(
        "q_layernorm.weight",
        "q_a_layernorm.weight",
        "q_low",
        split=Split.REPLICATED,
        **_WITH_LOW_QUERY,
    ),
    _low_rank("linear_q_up_proj.weight", "q_b_proj.weight", "query", "q_low", **_WITH_LOW_QUERY),
    _low_rank("linear_kv_down_proj.weight", "kv_a_proj_with_mqa.weight", "kv_down", "hidden"),
    _low_rank("kv_layernorm.weight", "kv_a_layernorm.weight", "kv_low", split=Split.REPLICATED),
    _low_rank("linear_kv_up_proj.weight", "kv_b_proj.weight", "kv_up", "kv_low"),
)

# Experts with sigmoid routers with a bias, and experts that every token passes through.
_BIASED_ROUTER = (
    _whole(
        _M + "mlp.router.expert_bias",
        _H + "mlp.gate.e_score_correction_bias",
        "experts",
        layers="moe",
        dtype="float32",
    ),
    *_EXPERTS,
    *_gated(_M + "mlp.shared_experts.", _H + "mlp.shared_experts.", "moe", "shared_ffn"),
)
_SIGMOID_EXPERTS = Experts(
    count=("n_routed_experts", "num_local_experts"),
    width="moe_intermediate_size",
    normalized="norm_topk_prob",
    shared_count="n_shared_experts",
    scoring="sigmoid",
)

# DeepSeek-V3 and Moonlight: latent attention, and experts with sigmoid routers with a bias.
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    class_prefix="DeepseekV3",
    entries=(
        *(entry for entry in _DENSE if "linear_qkv" not in entry.megatron),
        *_LATENT_ATTENTION,
        *_BIASED_ROUTER,
    ),
    fields=config_fields.DEEPSEEK_V3,
    latent_attention=True,
    experts=_SIGMOID_EXPERTS,
    prediction=PredictionLayer(),
)

# DeepSeek-V3.2 and GLM-5: DeepSeek-V3 with an indexer in each layer, which chooses the keys of a
# query. Up to `index_topk` tokens it chooses all of them, so longer sequences are refused.
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    model_type="deepseek_v32",
    class_prefix="DeepseekV32",
    fields=config_fields.DEEPSEEK_V32,
    carried=(r"model\.layers\.\d+\.self_attn\.indexer\.",),
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    model_type="glm_moe_dsa",
    class_prefix="GlmMoeDsa",
    fields=config_fields.GLM_MOE_DSA,
)

# GLM-4.5 to 4.7: the same experts with usual attention, whose bias and norms `config.json` gives,
# and rotary positions for a part of each head.
GLM4_MOE = Family(
    model_type="glm4_moe",
    class_prefix="Glm4Moe",
    entries=(*_DENSE, _QKV_BIAS, *_QK_NORM, *_BIASED_ROUTER),
    fields=config_fields.GLM4_MOE,
    experts=_SIGMOID_EXPERTS,
    prediction=PredictionLayer(),
)

# MiniMax-M2: Mixtral's names, sigmoid routers with a bias, and norms of Q and K over all heads.
MINIMAX_M2 = Family(
    model_type="minimax_m2",
    class_prefix="MiniMaxM2",
    entries=(
        *TRUNK,
        *(
            _whole(
                _ATTENTION_M + f"{name}_layernorm.weight",
                _ATTENTION_H + f"{name}_norm.weight",
                rows,
                split=Split.COLUMN,
            )
            for name, rows in (("q", "query"), ("k", "key"))
        ),
        _whole(
            _M + "mlp.router.expert_bias",
            _H + "block_sparse_moe.e_score_correction_bias",
            "experts",
            layers="moe",
            dtype="float32",
        ),
        *_routed("block_sparse_moe.", ("w1", "w3", "w2")),
    ),
    fields=config_fields.MINIMAX_M2,
    norm_over_heads=True,
    experts=Experts(
        count=("num_local_experts", "num_experts"),
        width="intermediate_size",
        normalized=True,
        scoring="sigmoid",
    ),
)


def _stacked(megatron: str, hf: str, split: Split, *shapes: tuple[str, ...]) -> Entry:
    """A row of experts: parts in turns in one tensor of all experts, matrices transposed."""
    parts = tuple(
        Part(
            _H + "mlp.experts." + hf,
            shape,
            step=len(shapes),
            phase=phase,
            transposed=len(shape) == 2,
            of_experts=True,
        )
        for phase, shape in enumerate(shapes)
    )
    return Entry(_M + "mlp.experts.local_experts.{expert}." + megatron, parts, split, "moe")


_WIDE = ("expert_ffn", "hidden")
# gpt-oss: experts with biases and clamped activations, attention with biases, sinks and windows.
GPT_OSS = Family(
    model_type="gpt_oss",
    class_prefix="GptOss",
    entries=(
        *TRUNK,
        _QKV_BIAS,
        _whole(_ATTENTION_M + "linear_proj.bias", _ATTENTION_H + "o_proj.bias", "hidden"),
        _whole(
            _ATTENTION_M + "core_attention.softmax_offset",
            _ATTENTION_H + "sinks",
            "heads",
            split=Split.COLUMN,
        ),
        _whole(_M + "mlp.router.weight", _H + "mlp.router.weight", "experts", "hidden"),
        _whole(_M + "mlp.router.bias", _H + "mlp.router.bias", "experts"),
        _stacked("linear_fc1.weight", "gate_up_proj", Split.STACKED, _WIDE, _WIDE),
        _stacked(
            "linear_fc1.bias", "gate_up_proj_bias", Split.STACKED, ("expert_ffn",), ("expert_ffn",)
        ),
        _stacked("linear_fc2.weight", "down_proj", Split.ROW, ("hidden", "expert_ffn")),
        _stacked("linear_fc2.bias", "down_proj_bias", Split.REPLICATED, ("hidden",)),
    ),
    fields=config_fields.GPT_OSS,
    qkv_bias=True,
    windows=2,
    sinks=True,
    experts=Experts(
        count=("num_local_experts", "num_experts"), width="intermediate_size", normalized=True
    ),
)

# Gemma 3: norms before and behind attention and MLP, windows with positions of their own.
_GEMMA_NORMS = {
    _M + "pre_mlp_layernorm.weight": "pre_feedforward_layernorm",
    _M + "post_self_attn_layernorm.weight": "post_attention_layernorm",
    _M + "post_mlp_layernorm.weight": "post_feedforward_layernorm",
}
GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    class_prefix="Gemma3",
    entries=(
        *(entry for entry in _DENSE if entry.megatron not in _GEMMA_NORMS),
        *(_whole(name, f"{_H}{hf}.weight", "hidden") for name, hf in _GEMMA_NORMS.items()),
        *_QK_NORM,
    ),
    fields=config_fields.GEMMA3_TEXT,
    qk_norm=True,
    windows=6,
    zero_centred_norms=True,
    norms_behind=True,
    scaled_embeddings=True,
    activation="gelu_tanh",
)

# GLM-4.7-Flash: DeepSeek-V3's layers.
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    class_prefix="Glm4MoeLite",
    fields=config_fields.GLM4_MOE_LITE,
)

# Kimi-K2: DeepSeek-V3 by another name; Kimi-K2.5 with a vision tower.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", known_as="deepseek_v3")
KIMI_K25 = replace(
    KIMI_K2,
    model_type="kimi_k25",
    language_class="KimiK25ForConditionalGeneration",
    within="text_config",
    prefix=("", "language_model."),
    carried=("vision_tower.", "mm_projector."),
)

# Mistral 7B to Nemo: Llama, without the window of the first.
MISTRAL = replace(LLAMA, model_type="mistral", class_prefix="Mistral", fields=config_fields.MISTRAL)

# Ministral 3: Mistral with queries that grow with their position.
MINISTRAL3 = replace(
    LLAMA,
    model_type="ministral3",
    class_prefix="Ministral3",
    fields=config_fields.MINISTRAL3,
    scaled_queries=True,
)

# Mistral Small 3 and Ministral 3 with a vision tower.
MISTRAL3, MISTRAL3_OF_MINISTRAL = (
    replace(
        text,
        model_type="mistral3",
        text_type=text.model_type,
        class_prefix="Mistral3",
        language_class="Mistral3ForConditionalGeneration",
        within="text_config",
        prefix=("", "language_model."),
        carried=("vision_tower.", "multi_modal_projector."),
    )
    for text in (MISTRAL, MINISTRAL3)
)

# Seed-OSS: Qwen2 whose biases `config.json` gives.
SEED_OSS = replace(
    QWEN2,
    model_type="seed_oss",
    class_prefix="SeedOss",
    fields=config_fields.SEED_OSS,
    qkv_bias=False,
)

# SmolLM3: Llama with layers without positions.
SMOLLM3 = replace(LLAMA, model_type="smollm3", class_prefix="SmolLM3", fields=config_fields.SMOLLM3)

FAMILIES: dict[str, Family] = {
    family.key: family
    for family in (
        LLAMA,
        QWEN2,
        MIMO,
        QWEN3,
        QWEN2_MOE,
        QWEN3_MOE,
        MIXTRAL,
        DEEPSEEK_V3,
        DEEPSEEK_V32,
        GLM_MOE_DSA,
        GLM4_MOE,
        MINIMAX_M2,
        GPT_OSS,
        GEMMA3_TEXT,
        GLM4_MOE_LITE,
        KIMI_K2,
        KIMI_K25,
        MISTRAL,
        MINISTRAL3,
        MISTRAL3,
        MISTRAL3_OF_MINISTRAL,
        SEED_OSS,
        SMOLLM3,
    )
}
