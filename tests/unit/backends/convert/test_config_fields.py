"""Every field of every family: read as transformers' own configuration class reads it, or refused.

The fields come from the tables that the reader goes by, so a new one is tried without a line here.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from backends.megatron.batch.rotary import inverse_frequencies
from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.config_fields import ROPE
from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.read import read_architecture
from rlcore.errors import ModelError

LEFT_OUT: Any = object()
HUGE = 10**400
VALUES = [
    LEFT_OUT, None, True, False, "8", "", 0, 1, 3, -4, HUGE, 0.0, 1.0, -1.5, 1e-5, float("nan"),
    float("inf"), [], [0], ["full_attention"] * 4, ["indexed_attention"] * 4,
    ["dense", "sparse", "dense", "sparse"], {}, {"0": "LABEL_0"},
    ["mamba", "attention", "mlp"], "ME*-", "M8",
]  # fmt: skip
# Of settings, which are numbers, words and truth values.
SETTINGS = [
    LEFT_OUT, None, True, "8", 0, 1, 2.5, -4, HUGE, 32.0, 8192, float("nan"), [0], {"a": "b"},
]  # fmt: skip

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
QWEN_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite")
DELTA = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 6, "linear_value_head_dim": 10,
}  # fmt: skip
BLOCKS = ["linear_attention", "moe", "full_attention", "mlp"]
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
OWN: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": None}, "seed_oss": {"head_dim": 8}, "smollm3": {},
    "ministral3": {"head_dim": 8, "max_position_embeddings": 32768},
    "qwen2_moe": {**QWEN_MOE, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**QWEN_MOE, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": {
        "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8, "rotary_dim": 4,
    },
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 8},
    "glm4_moe": {
        "head_dim": 8, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 1,
    },
    "qwen3_next": {
        **QWEN_MOE, **DELTA, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1],
    },
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**QWEN_MOE, **DELTA, "shared_expert_intermediate_size": 24},
    "nemotron_h": {
        "layers_block_type": BLOCKS, "head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 10,
        "n_groups": 2, "ssm_state_size": 6, "n_routed_experts": 8, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
    },
    **{name: {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 2, "topk_group": 2,
        "routed_scaling_factor": 2.5,
    } for name in LATENT},
}  # fmt: skip
DELTA_SIZES = (
    "conv_kernel_dim", *(key.removeprefix("linear_") for key in DELTA if key != "head_dim")
)  # fmt: skip
SIGMOID = (*LATENT, "glm4_moe", "nemotron_h")
EPSILON = {"nemotron_h": "layer_norm_epsilon"}
WINDOWED = ("mixtral", "mistral", "ministral3")
# Of which transformers rotates a part of each head.
PARTIAL = ("glm4_moe", "minimax_m2", *HYBRID)
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "mscale": 0.7, "mscale_all_dim": 0.5,
    },
    "longrope": {
        "rope_type": "longrope", "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 7.0],
    },
}  # fmt: skip
SPELLINGS = "rope_scaling", "rope_parameters"

# MiMo is none of transformers' own
every_family = pytest.mark.parametrize("family", sorted(FAMILIES.keys() & OWN))
every_rotary_family = pytest.mark.parametrize(
    "family", sorted((FAMILIES.keys() & OWN) - {"nemotron_h"})
)


def base(family: str, head: str = "CausalLM") -> dict[str, Any]:
    name = FAMILIES[family].classes[head != "CausalLM"]
    return {"model_type": family, "architectures": [name], **SIZES, **OWN[family]}


def changed(config: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    rest = {name: old for name, old in config.items() if name != key}
    return rest if value is LEFT_OUT else {**rest, key: value}


def ropes_of(family: str) -> dict[str, dict[str, Any]]:
    """ROPES for the rotated part of the family's heads."""
    pairs = 2 if family in PARTIAL else 4
    long = ROPES["longrope"]
    cut = {key: long[key][:pairs] for key in ("short_factor", "long_factor")}
    found = {**ROPES, "longrope": {**long, **cut}}
    if family == "ministral3":
        return {kind: {**rope, "llama_4_scaling_beta": 0.25} for kind, rope in found.items()}
    return found


def theirs(config: dict[str, Any]) -> PretrainedConfig | None:
    """What transformers reads; None where it refuses the configuration."""
    # It would make a list of so many layers or labels.
    if HUGE in (config.get("num_hidden_layers"), config.get("num_labels")):
        return None
    try:
        # It writes into what it is given.
        config = copy.deepcopy(config)
        if config["model_type"] == "mixtral" and config.get("head_dim") is None:
            # Its longrope and yarn multiply the null that is Mixtral's default.
            config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
        return CONFIG_MAPPING[config["model_type"]].from_dict(config)
    except (
        StrictDataclassError,
        ArithmeticError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
    ):
        return None


def meant(config: PretrainedConfig) -> dict[str, Any]:
    """The values of transformers' configuration, and those of its layers' rules."""
    family = config.model_type
    latent = family in LATENT
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if family != "nemotron_h":
        # As a model does when it is built.
        config.standardize_rope_params()
    rope = getattr(config, "rope_parameters", None)
    found = {
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        # No layer of one family has this width.
        "intermediate_size": (
            None if family == "qwen3_5_moe_text" else config.intermediate_size
        ),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads, "groups": config.num_key_value_heads,
        "positions": config.max_position_embeddings,
        "epsilon": getattr(config, EPSILON.get(family, "rms_norm_eps")),
        "tied": config.tie_word_embeddings,
        "norms": family in ("qwen3", "qwen3_moe", *HYBRID)
        or (family == "glm4_moe" and config.use_qk_norm),
        "bias": getattr(config, "attention_bias", False) or family in ("qwen2", "qwen2_moe"),
        "rotates": [bool(x) for x in getattr(config, "no_rope_layers", None) or ()]
        or [True] * config.num_hidden_layers,
        "head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim if latent else head_dim,
        "rope": rope and [rope["rope_type"], *meant_angles(config)],
        "windows": [
            config.sliding_window
            if family == "gpt_oss" and config.layer_types[layer] == "sliding_attention"
            else None
            for layer in range(config.num_hidden_layers)
        ],
    }  # fmt: skip
    if family in HYBRID:
        found["recurrent"] = [kind == "linear_attention" for kind in config.layer_types]
        found["rotates"] = [not recurrent for recurrent in found["recurrent"]]
        if all(found["recurrent"]):
            found["rope"] = None
        found["delta"] = [getattr(config, f"linear_{key}") for key in DELTA_SIZES]
    if family == "nemotron_h":
        found |= {"blocks": config.layers_block_type, "rotates": [False] * found["layers"],
                  "recurrent": [kind == "linear_attention" for kind in config.layers_block_type],
                  "mamba": [config.conv_kernel, config.n_groups, config.mamba_num_heads,
                            config.ssm_state_size, config.mamba_head_dim]}  # fmt: skip
        if "moe" not in found["blocks"]:
            return found
    return {**found, **(meant_experts(config) if hasattr(config, "num_experts_per_tok") else {})}


def meant_angles(config: PretrainedConfig) -> list[Any]:
    """The frequencies of short and long sequences, and the attention factor."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        partial = config.model_type in PARTIAL
        module: Any = Glm4MoeRotaryEmbedding if partial else LlamaRotaryEmbedding
        one, factor = module.compute_default_rope_parameters(config)
        return [one.tolist(), one.tolist(), factor, 0.0]
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    # The functions read `head_dim` without a default.
    config.head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    one, factor = compute(config)
    long, _ = compute(config, seq_len=rope.get("original_max_position_embeddings", 0) + 1)
    return [one.tolist(), long.tolist(), factor, rope.get("llama_4_scaling_beta", 0.0)]


def meant_experts(config: PretrainedConfig) -> dict[str, Any]:
    family = config.model_type
    layers = range(config.num_hidden_layers)
    found = {"topk": config.num_experts_per_tok}
    if family in ("mixtral", "minimax_m2", "gpt_oss"):
        return {
            **found,
            "experts": config.num_local_experts,
            "normalized": True,
            "expert_layers": [True for _ in layers],
            "width": config.intermediate_size,
        }
    # All experts of Qwen3.5 are normalised, and all its layers have them.
    has = {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
    has = {key: getattr(config, key, default) for key, default in has.items()}
    found |= {"normalized": bool(has["norm_topk_prob"]), "width": config.moe_intermediate_size}
    if family in SIGMOID:
        found |= {"experts": config.n_routed_experts,
                  "expert_layers": [
                      kind == "sparse" for kind in config.mlp_layer_types
                  ] if hasattr(config, "mlp_layer_types") else [
                      layer >= getattr(config, "first_k_dense_replace", 0) for layer in layers
                  ],
                  "shared": config.n_shared_experts * config.moe_intermediate_size,
                  "groups_of_experts": [config.n_group, config.topk_group],
                  "scale": config.routed_scaling_factor}  # fmt: skip
    if family == "nemotron_h":
        found["expert_layers"] = [kind == "moe" for kind in config.layers_block_type]
        found["shared"] = config.moe_shared_expert_intermediate_size
    if family in ("glm4_moe", "nemotron_h"):
        return found
    if family in LATENT:
        return {**found, "rotary": config.head_dim,
                "interleave": bool(getattr(config, "rope_interleave", True)),
                "ranks": [config.q_lora_rank, config.kv_lora_rank, config.v_head_dim]}  # fmt: skip
    sparse = [
        layer not in has["mlp_only_layers"]
        and config.num_experts > 0
        and (layer + 1) % has["decoder_sparse_step"] == 0
        for layer in layers
    ]
    found |= {"experts": config.num_experts, "expert_layers": sparse}
    if family in ("qwen2_moe", *HYBRID):
        found["shared"] = config.shared_expert_intermediate_size
    return found


def ours(arch: Architecture) -> dict[str, Any]:
    """The same of an architecture."""
    t = arch.transformer
    (rope,) = {*arch.ropes} - {None} or {None}
    assert len(arch.ropes) == t["num_layers"]
    [rope] = {*arch.ropes} - {None} or [None]
    found = {
        "vocab_size": arch.vocab_size, "hidden_size": t["hidden_size"],
        "intermediate_size": t["ffn_hidden_size"], "layers": t["num_layers"],
        "heads": t["num_attention_heads"], "groups": t["num_query_groups"],
        "positions": arch.max_position_embeddings, "epsilon": t["layernorm_epsilon"],
        "tied": arch.tie_word_embeddings, "head_dim": t["kv_channels"],
        "norms": t["qk_layernorm"], "bias": t["add_qkv_bias"],
        "windows": [*(arch.windows or [None] * arch.num_layers)],
        "rotates": [one is not None for one in arch.ropes],
        "rope": rope and [
            rope.kind,
            *(inverse_frequencies(rope, long=long).tolist() for long in (False, True)),
            rope.attention_factor,
            rope.query_beta,
        ],
    }  # fmt: skip
    if arch.num_experts:
        found |= {
            "experts": arch.num_experts, "topk": t["moe_router_topk"],
            "normalized": not t["moe_router_pre_softmax"], "expert_layers": arch.moe_layers,
            "width": t["moe_ffn_hidden_size"],
        }  # fmt: skip
    if arch.family in HYBRID:
        found["recurrent"] = arch.recurrent_layers
        found["delta"] = [t[f"linear_{key}"] for key in DELTA_SIZES]
    if arch.family == "qwen3_5_moe_text":
        found["intermediate_size"] = None
    if arch.num_experts and arch.family in ("qwen2_moe", *HYBRID, *SIGMOID):
        found["shared"] = t["moe_shared_expert_intermediate_size"]
    if arch.family == "nemotron_h":
        found |= {
            "recurrent": arch.recurrent_layers,
            "blocks": ["mlp" if block == "dense" else block for block in arch.blocks],
            "mamba": [t[f"linear_{key}"] for key in DELTA_SIZES],
        }
    if arch.num_experts and arch.family in SIGMOID:
        found |= {
            "groups_of_experts": [t["moe_router_num_groups"], t["moe_router_group_topk"]],
            "scale": t["moe_router_topk_scaling_factor"],
        }  # fmt: skip
    if arch.latent_attention:
        assert rope is not None
        found |= {
            "rotary": t["qk_pos_emb_head_dim"], "interleave": rope is not None and rope.interleaved,
            "ranks": [t["q_lora_rank"], t["kv_lora_rank"], t["v_head_dim"]],
        }  # fmt: skip
    return found


def converted(config: PretrainedConfig) -> bool:
    """Whether a model of transformers' configuration has nothing that we do not convert."""
    has = {field.name: getattr(config, field.name) for field in fields(config)}
    biased = {"glm4_moe": (True, False), "seed_oss": (True, False), "gpt_oss": (True,)}
    kinds = {
        "full_attention",
        "linear_attention" if config.model_type in HYBRID else "indexed_attention",
    }
    if config.model_type == "gpt_oss":
        kinds.add("sliding_attention")
    windows = has.get("use_sliding_window") or (
        config.model_type in WINDOWED and config.sliding_window is not None
    )
    if config.model_type == "nemotron_h":
        config.hidden_act = config.mamba_hidden_act
        config.rope_parameters = {}
        kinds = {*BLOCKS}
        windows = config.sliding_window is not None
    return (
        config.hidden_act == "silu"
        and has.get("attention_bias", False) in biased.get(config.model_type, (False,))
        and not has.get("attention_out_bias")
        and not has.get("mlp_bias")
        and has.get("qkv_bias", True)
        and not windows
        and set(has.get("layer_types") or ["full_attention"]) <= kinds
        and (
            config.model_type in PARTIAL
            or config.rope_parameters.get("partial_rotary_factor") in (None, 1)
        )
        and getattr(config, "quantization_config", None) is None
        and not config.is_heterogeneous
    )


def check(folder: Path, config: dict[str, Any], named: str | None = None) -> bool:
    """Read a configuration as both do; whether ours is accepted.

    Args:
        named: the field that a refusal names.
    """
    (folder / "config.json").write_text(json.dumps(config))
    expected = theirs(json.loads(json.dumps(config)))
    try:
        arch = read_architecture(folder, weights=False)
    except ModelError as error:
        message = str(error)
        words = (named, ALSO_NAMED.get(named, named)) if named else ("",)
        assert any(word in message for word in words), message
        assert str(folder) in message, message
        return False
    assert expected is not None, f"transformers refuses {config}"
    assert converted(expected), config
    got = ours(arch)
    wanted = meant(expected)
    if not any(wanted["rotates"]):
        wanted["rope"] = None
    assert got == wanted, config
    if arch.head == "value":
        assert expected.num_labels == 1
        assert expected.problem_type != "single_label_classification"
    return True


# Where a message names another field of the same question.
ALSO_NAMED = {
    "num_hidden_layers": "layer", "num_labels": "label", "id2label": "label",
    "num_attention_heads": "heads", "num_experts": "expert", "num_local_experts": "expert",
    "n_routed_experts": "expert", "decoder_sparse_step": "experts", "mlp_only_layers": "experts",
    "architectures": "architecture", "qk_rope_head_dim": "head_dim",
    "rotary_dim": "partial_rotary_factor", "n_groups": "mamba_num_heads",
    "num_experts_per_tok": "expert", "layers_block_type": "layer", "n_group": "group",
}  # fmt: skip


def cases(family: str) -> Iterator[tuple[dict[str, Any], str, Any]]:
    for key in FAMILIES[family].fields:
        for head in ("CausalLM", "SequenceClassification"):
            if head == "CausalLM" or key in ("num_labels", "id2label", "problem_type"):
                config = base(family, head)
                if head != "CausalLM":
                    config["id2label"] = {"0": "LABEL_0"}
                for value in (config.get(key, LEFT_OUT), *VALUES):
                    yield config, key, value


@every_family
def test_a_field_is_what_transformers_reads_or_is_refused_by_name(
    family: str, tmp_path: Path
) -> None:
    assert check(tmp_path, base(family))
    accepted = set()
    for config, key, value in cases(family):
        if check(tmp_path, changed(config, key, value), key):
            accepted.add(key)
    never = set(FAMILIES[family].fields) - accepted
    assert never == set(), f"no value of {never} was accepted"


@pytest.mark.rest
@every_rotary_family
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_so_is_each_setting_of_rotary_positions(family: str, spelling: str, tmp_path: Path) -> None:
    kinds = ("default", "yarn") if family in LATENT else tuple(ROPE)
    if family == "ministral3":
        kinds = ("llama3", "yarn", "longrope")
    for kind, rope in ropes_of(family).items():
        config = base(family) | {"max_position_embeddings": 8192 if kind == "llama3" else 64}
        assert check(tmp_path, {**config, spelling: rope}, "rope_type") == (kind in kinds)
        for key in (*ROPE[kind], "type", "partial_rotary_factor", "full_attention"):
            for value in (*SETTINGS, kind, {"rope_type": "default", "rope_theta": 5.0}):
                check(tmp_path, {**config, spelling: changed(rope, key, value)}, "rope")


@pytest.mark.rest
@every_family
def test_two_fields_together(family: str, tmp_path: Path) -> None:
    """Contradictions: any fields with values of valid types, and either spelling of RoPE."""
    draw = random.Random(7)
    sizes: list[Any] = [1, 2, 3, 4, 6, 8, 16, 33, LEFT_OUT, None]
    pool: dict[str, list[Any]] = {"rope_theta": [500.0, 700, LEFT_OUT]}
    names = FAMILIES[family].fields
    for key, field in names.items():
        if field.kind in ("size", "count"):
            pool[key] = sizes
        elif field.kind == "flag":
            pool[key] = [True, False, LEFT_OUT]
        elif field.kind in ("counts", "texts") and key != "architectures":
            pool[key] = [
                [],
                [0, 3],
                ["full_attention"] * 4,
                ["sliding_attention"] * 4,
                ["linear_attention", "full_attention"] * 2,
                None,
            ]
    ropes = [
        *ropes_of(family).values(),
        {"type": "linear", "factor": 2.0},
        {"rope_theta": 700.0},
        {},
        None,
    ]
    if family != "nemotron_h":
        pool |= {
            spelling: [*ropes, {**ROPES["linear"], "type": "llama3"}] for spelling in SPELLINGS
        }
    accepted = 0
    for _ in range(600):
        config = base(family)
        for key in draw.sample(sorted(pool), draw.choice((2, 2, 3))):
            config = changed(config, key, draw.choice(pool[key]))
        accepted += check(tmp_path, config)
    assert accepted > 25


@every_rotary_family
def test_two_spellings_of_rotary_positions(family: str, tmp_path: Path) -> None:
    rope = {
        **ropes_of(family)["yarn" if family == "ministral3" else "default"],
        "rope_theta": 500.0,
    }
    both = {**base(family), "rope_scaling": rope, "rope_parameters": rope}
    assert check(tmp_path, both)
    assert check(tmp_path, {**both, "rope_theta": 500})
    for key, other in (
        ("rope_scaling", {**rope, "rope_theta": 7.0}),
        ("rope_parameters", {"rope_type": "default"}),
        ("rope_theta", 7.0),
    ):
        assert not check(tmp_path, {**both, key: other}, key), (key, other)


@every_family
def test_defaults_are_those_of_transformers(family: str) -> None:
    plain: Any = CONFIG_MAPPING[family]()
    declared = {field.name for field in fields(plain)}
    for key, field in FAMILIES[family].fields.items():
        if key == "rope_theta":
            assert field.default == plain.default_theta
        elif key in declared and isinstance(field.default, int | float | str):
            assert field.default == getattr(plain, key), key
