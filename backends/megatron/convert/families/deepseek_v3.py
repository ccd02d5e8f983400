"""DeepSeek-V3 and Moonlight: latent attention, and experts behind sigmoid routers with a bias.

The layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers
leaves them out.
"""

from __future__ import annotations

from backends.megatron.convert.families.llama import ENTRIES as LLAMA
from backends.megatron.convert.families.qwen3_moe import EXPERTS
from backends.megatron.convert.table import Entry, Experts, Family, Split

_M = "decoder.layers.{layer}.self_attention."
_H = "model.layers.{layer}.self_attn."
_MOE_M = "decoder.layers.{layer}.mlp."
_MOE_H = "model.layers.{layer}.mlp."
_SHARED_M = _MOE_M + "shared_experts."
_SHARED_H = _MOE_H + "shared_experts."

# its o_proj is of another shape here
TRUNK = tuple(entry for entry in LLAMA if "linear_qkv" not in entry.megatron)

ATTENTION = (
    Entry(_M + "linear_q_proj.weight", (_H + "q_proj.weight",), Split.COLUMN, unless="q_lora_rank"),
    Entry(
        _M + "linear_q_down_proj.weight",
        (_H + "q_a_proj.weight",),
        Split.COLUMN,
        where="q_lora_rank",
    ),
    Entry(
        _M + "q_layernorm.weight",
        (_H + "q_a_layernorm.weight",),
        Split.REPLICATED,
        where="q_lora_rank",
    ),
    Entry(
        _M + "linear_q_up_proj.weight", (_H + "q_b_proj.weight",), Split.COLUMN, where="q_lora_rank"
    ),
    Entry(_M + "linear_kv_down_proj.weight", (_H + "kv_a_proj_with_mqa.weight",), Split.COLUMN),
    Entry(_M + "kv_layernorm.weight", (_H + "kv_a_layernorm.weight",), Split.REPLICATED),
    Entry(_M + "linear_kv_up_proj.weight", (_H + "kv_b_proj.weight",), Split.COLUMN),
)

ROUTER_BIAS = Entry(
    _MOE_M + "router.expert_bias",
    (_MOE_H + "gate.e_score_correction_bias",),
    Split.REPLICATED,
    "moe",
    dtype="float32",
)

SHARED_EXPERTS = (
    Entry(
        _SHARED_M + "linear_fc1.weight",
        (_SHARED_H + "gate_proj.weight", _SHARED_H + "up_proj.weight"),
        Split.GATED,
        "moe",
    ),
    Entry(_SHARED_M + "linear_fc2.weight", (_SHARED_H + "down_proj.weight",), Split.ROW, "moe"),
)

DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    class_prefix="DeepseekV3",
    entries=(*TRUNK, *ATTENTION, ROUTER_BIAS, *EXPERTS, *SHARED_EXPERTS),
    latent_attention=True,
    experts=Experts(
        count=("n_routed_experts",),
        width="moe_intermediate_size",
        normalized="norm_topk_prob",
        shared_count="n_shared_experts",
        scoring="sigmoid",
    ),
)
