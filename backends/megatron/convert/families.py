"""The families that we convert: the table of each, and facts that its `config.json` leaves out.

To add a family, write its table here and add it to `FAMILIES`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backends.megatron.convert import config_fields
from backends.megatron.convert.rows import (
    ATTENTION_H,
    ATTENTION_M,
    BIASED_ROUTER,
    DENSE,
    EXPERTS,
    GEMMA3_ROWS,
    GEMMA4_ROWS,
    LATENT_ATTENTION,
    NEMOTRON_H_ROWS,
    NORMS_OVER_HEADS,
    OLMO3_ROWS,
    QK_NORM,
    QKV_BIAS,
    QWEN3_5_DELTA,
    QWEN3_NEXT_DELTA,
    TRUNK,
    H,
    M,
    gated,
    hybrid,
    routed,
    stacked,
    whole,
)
from backends.megatron.convert.table import (
    GATED_DELTA,
    MAMBA_2,
    Experts,
    Family,
    PredictionLayer,
    Split,
)
from rlcore.hf_config.language import KNOWN_AS, PREFIXES

LLAMA = Family(model_type="llama", class_prefix="Llama", entries=DENSE, fields=config_fields.LLAMA)

# Qwen2 and Qwen2.5: Llama with a bias on Q, K and V.
QWEN2 = Family(
    model_type="qwen2",
    class_prefix="Qwen2",
    entries=(*DENSE, QKV_BIAS),
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
    known_as=KNOWN_AS["mimo"],
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
    entries=(*DENSE, *QK_NORM),
    fields=config_fields.QWEN3,
    qk_norm=True,
)

# Qwen2-MoE and Qwen1.5-MoE: Qwen2 with routed experts, and a gated expert for every token.
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    class_prefix="Qwen2Moe",
    entries=(
        *QWEN2.entries,
        *EXPERTS,
        *gated(M + "mlp.shared_experts.", H + "mlp.shared_expert.", "moe", "shared_ffn"),
        whole(
            M + "mlp.shared_experts.gate_weight",
            H + "mlp.shared_expert_gate.weight",
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
    entries=(*QWEN3.entries, *EXPERTS),
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
    entries=(*TRUNK, *routed("block_sparse_moe.", ("w1", "w3", "w2"))),
    fields=config_fields.MIXTRAL,
    experts=Experts(
        count=("num_local_experts", "num_experts"), width="intermediate_size", normalized=True
    ),
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
        *(entry for entry in DENSE if "linear_qkv" not in entry.megatron),
        *LATENT_ATTENTION,
        *BIASED_ROUTER,
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
    entries=(*DENSE, QKV_BIAS, *QK_NORM, *BIASED_ROUTER),
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
        *NORMS_OVER_HEADS,
        whole(
            M + "mlp.router.expert_bias",
            H + "block_sparse_moe.e_score_correction_bias",
            "experts",
            layers="moe",
            dtype="float32",
        ),
        *routed("block_sparse_moe.", ("w1", "w3", "w2")),
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


_WIDE = ("expert_ffn", "hidden")
# gpt-oss: experts with biases and clamped activations, attention with biases, sinks and windows.
GPT_OSS = Family(
    model_type="gpt_oss",
    class_prefix="GptOss",
    entries=(
        *TRUNK,
        QKV_BIAS,
        whole(ATTENTION_M + "linear_proj.bias", ATTENTION_H + "o_proj.bias", "hidden"),
        whole(
            ATTENTION_M + "core_attention.softmax_offset",
            ATTENTION_H + "sinks",
            "heads",
            split=Split.COLUMN,
        ),
        whole(M + "mlp.router.weight", H + "mlp.router.weight", "experts", "hidden"),
        whole(M + "mlp.router.bias", H + "mlp.router.bias", "experts"),
        stacked("linear_fc1.weight", "gate_up_proj", Split.STACKED, _WIDE, _WIDE),
        stacked(
            "linear_fc1.bias", "gate_up_proj_bias", Split.STACKED, ("expert_ffn",), ("expert_ffn",)
        ),
        stacked("linear_fc2.weight", "down_proj", Split.ROW, ("hidden", "expert_ffn")),
        stacked("linear_fc2.bias", "down_proj_bias", Split.REPLICATED, ("hidden",)),
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
GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    class_prefix="Gemma3",
    entries=GEMMA3_ROWS,
    fields=config_fields.GEMMA3_TEXT,
    qk_norm=True,
    windows=6,
    zero_centred_norms=True,
    norms_behind=True,
    scaled_embeddings=True,
    activation="gelu_tanh",
)
GEMMA3 = replace(
    GEMMA3_TEXT,
    model_type="gemma3",
    language_class="Gemma3ForConditionalGeneration",
    fields=config_fields.GEMMA3,
    within="text_config",
    prefix=PREFIXES["gemma3"],
    carried=("vision_tower.", "multi_modal_projector."),
)

# Gemma 4: Gemma 3 with values that pass a norm, which are the keys in layers without a window.
GEMMA4_TEXT = replace(
    GEMMA3_TEXT,
    model_type="gemma4_text",
    class_prefix="Gemma4",
    entries=GEMMA4_ROWS,
    fields=config_fields.GEMMA4_TEXT,
    zero_centred_norms=False,
    normed_values=True,
    scaled_layers=True,
)
GEMMA4 = replace(
    GEMMA4_TEXT,
    model_type="gemma4",
    language_class="Gemma4ForConditionalGeneration",
    within="text_config",
    prefix=PREFIXES["gemma4"],
    carried=(r"model\.(vision|audio)_tower\.", r"model\.embed_(vision|audio)\."),
)

# Olmo 3: norms behind attention and MLP alone, windows in most layers.
OLMO3 = Family(
    model_type="olmo3",
    class_prefix="Olmo3",
    entries=OLMO3_ROWS,
    fields=config_fields.OLMO3,
    norm_over_heads=True,
    windows=4,
    norms_before=False,
    norms_behind=True,
)

# GLM-4.7-Flash: DeepSeek-V3's layers.
GLM4_MOE_LITE = replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    class_prefix="Glm4MoeLite",
    fields=config_fields.GLM4_MOE_LITE,
)

# Kimi-K2: DeepSeek-V3 by another name; Kimi-K2.5 with a vision tower.
KIMI_K2 = replace(DEEPSEEK_V3, model_type="kimi_k2", known_as=KNOWN_AS["kimi_k2"])
KIMI_K25 = replace(
    KIMI_K2,
    model_type="kimi_k25",
    language_class="KimiK25ForConditionalGeneration",
    within="text_config",
    prefix=PREFIXES["kimi_k25"],
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
        prefix=PREFIXES["mistral3"],
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

# Qwen2-MoE's feed-forward nets.
_SHARED_EXPERTS = tuple(entry for entry in QWEN2_MOE.entries if entry not in QWEN2.entries)

QWEN3_NEXT = Family(
    model_type="qwen3_next",
    class_prefix="Qwen3Next",
    entries=hybrid((*QWEN3.entries, *_SHARED_EXPERTS), QWEN3_NEXT_DELTA),
    fields=config_fields.QWEN3_NEXT,
    qk_norm=True,
    experts=QWEN2_MOE.experts,
    carried=("mtp.",),
    recurrence=GATED_DELTA,
)

# Qwen3.5 and 3.6: the text model, dense and with experts, alone or with a vision tower.
QWEN3_5_TEXT = Family(
    model_type="qwen3_5_text",
    class_prefix="Qwen3_5Text",
    language_class="Qwen3_5ForCausalLM",
    entries=hybrid(QWEN3.entries, QWEN3_5_DELTA),
    fields=config_fields.QWEN3_5,
    qk_norm=True,
    carried=("mtp.",),
    recurrence=GATED_DELTA,
)
QWEN3_5_MOE_TEXT = Family(
    model_type="qwen3_5_moe_text",
    class_prefix="Qwen3_5Moe",
    entries=hybrid((*TRUNK, *QK_NORM, *_SHARED_EXPERTS), QWEN3_5_DELTA),
    fields=config_fields.QWEN3_5_MOE,
    qk_norm=True,
    experts=Experts(
        count=("num_experts",),
        width="moe_intermediate_size",
        normalized=True,
        shared_width="shared_expert_intermediate_size",
    ),
    carried=("mtp.",),
    recurrence=GATED_DELTA,
)
_WITH_VISION: dict[str, Any] = {"carried": ("mtp.", "model.visual."), "within": "text_config"}
QWEN3_5 = replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    class_prefix="Qwen3_5",
    language_class="Qwen3_5ForConditionalGeneration",
    prefix=PREFIXES["qwen3_5"],
    **_WITH_VISION,
)
QWEN3_5_MOE = replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_5_moe",
    language_class="Qwen3_5MoeForConditionalGeneration",
    prefix=PREFIXES["qwen3_5_moe"],
    **_WITH_VISION,
)

# Nemotron-H and Nemotron-3: layers that are one block each: Mamba-2, attention without positions, a
# feed-forward net without a gate, or experts.
NEMOTRON_H = Family(
    model_type="nemotron_h",
    class_prefix="NemotronH",
    entries=NEMOTRON_H_ROWS,
    fields=config_fields.NEMOTRON_H,
    prefix=PREFIXES["nemotron_h"],
    experts=Experts(
        count=("n_routed_experts", "num_local_experts"),
        width="moe_intermediate_size",
        normalized="norm_topk_prob",
        shared_width="moe_shared_expert_intermediate_size",
        shared_gate=False,
        scoring="sigmoid",
    ),
    carried=("mtp.",),
    activation="relu2",
    recurrence=MAMBA_2,
    single_blocks=True,
)

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
        GEMMA3,
        GEMMA4_TEXT,
        GEMMA4,
        OLMO3,
        GLM4_MOE_LITE,
        KIMI_K2,
        KIMI_K25,
        MISTRAL,
        MINISTRAL3,
        MISTRAL3,
        MISTRAL3_OF_MINISTRAL,
        SEED_OSS,
        SMOLLM3,
        QWEN3_NEXT,
        QWEN3_5_TEXT,
        QWEN3_5_MOE_TEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        NEMOTRON_H,
    )
}
