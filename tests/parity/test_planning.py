"""The plan's bytes against the unique storages of models really built and trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases import make_config
from spawn import run_ranks

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.read import read_architecture
from rlcore.config import Config
from rlcore.launch.commands.plan import configured_layout
from rlcore.planning.activations import training_bytes
from rlcore.planning.fit import training_groups
from rlcore.planning.memory import Load, gradient_bytes, optimizer_bytes, rank_weights

RANKS = Path(__file__).with_name("memory_ranks.py")
SIZES: dict[str, Any] = {
    "vocab_size": 1001, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
MODELS = {
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 160}),
    "llama": ("LlamaConfig", {}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3_mqa": ("Qwen3Config", {"head_dim": 32, "num_key_value_heads": 1}),
    "llama_mqa": ("LlamaConfig", {"num_key_value_heads": 1}),
}
FULL = {
    "megatron": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
}


def selective(*modules: str) -> dict[str, Any]:
    return {"megatron": {"recompute_granularity": "selective", "recompute_modules": list(modules)}}


TP2: dict[str, Any] = {"parallel": {"tensor": 2}}
TP2_SP: dict[str, Any] = {"parallel": {"tensor": 2, "sequence": True}}
EP2: dict[str, Any] = {"parallel": {"expert": 2}, "data": 2}
TP2_EP2: dict[str, Any] = {
    "parallel": {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 1}
}
CP2: dict[str, Any] = {"parallel": {"context": 2}}
PP2: dict[str, Any] = {"parallel": {"pipeline": 2}}
PP2_UNEVEN: dict[str, Any] = {"parallel": {"pipeline": 2, "first_stage_layers": 1}}
VPP2: dict[str, Any] = {"parallel": {"pipeline": 2, "virtual_pipeline": 2}, "micro_batches": 4}
BF16 = {"dtype": "bf16"}
DISTRIBUTED = {"distributed": True}
OFFLOAD = {"offload_optimizer": True}


def case(name: str, model: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "model": model, "tokens": 256, "trainable": 128, "micro_batches": 2} | {
        key: value for part in parts for key, value in part.items()
    }


# By the number of ranks; the first of each are in the default tier.
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        case("one", "qwen3"),
        case("one_bf16", "qwen3", BF16),
        case("full", "qwen3", FULL),
        case("experts", "qwen3_moe"),
        case("experts_shared", "qwen2_moe"),
    ],
    2: [
        case("tp2_sp", "qwen3", TP2_SP),
        case("pp2_uneven", "qwen3", PP2_UNEVEN),
        case("dp2_distributed", "qwen3", {"data": 2}, DISTRIBUTED),
        case("cp2", "qwen3", CP2),
        case("tp2_etp1_ep2", "qwen3_moe", TP2_EP2),
        case("tp2_sp_mqa", "qwen3_mqa", TP2_SP),
    ],
}
MORE: dict[int, list[dict[str, Any]]] = {
    1: [
        case("llama", "llama"),
        case("qwen2_tied_bf16", "qwen2_tied", BF16),
        case("core_attn", "qwen3", selective("core_attn")),
        case("core_attn_llama", "llama", selective("core_attn")),
        case("mlp", "qwen3", selective("mlp")),
        case("both", "qwen3", selective("core_attn", "mlp")),
        case("offload_bf16", "qwen3", BF16, OFFLOAD),
        case("experts_bf16", "qwen3_moe", BF16),
        case("experts_full", "qwen3_moe", FULL),
        case("experts_core_attn", "qwen3_moe", selective("core_attn")),
        case("experts_moe", "qwen2_moe", selective("moe")),
    ],
    2: [
        case("tp2", "qwen3", TP2),
        case("tp2_sp_full", "qwen3", TP2_SP, FULL),
        case("tp2_mqa_llama", "llama_mqa", TP2),
        case("tp2_mqa_llama_core_attn", "llama_mqa", TP2, selective("core_attn")),
        case("tp2_mqa_core_attn", "qwen3_mqa", TP2, selective("core_attn")),
        case("pp2", "qwen3", PP2),
        case("pp2_tied", "qwen2_tied", PP2, {"micro_batches": 4}),
        case("pp2_uneven_full", "qwen2_tied", PP2_UNEVEN, FULL, {"micro_batches": 4}),
        case("vpp2", "qwen3", VPP2),
        case("dp2_distributed_bf16", "llama", {"data": 2}, DISTRIBUTED, BF16),
        case("dp2_distributed_offload", "llama", {"data": 2}, DISTRIBUTED, OFFLOAD),
        case("ep2", "qwen3_moe", EP2),
        case("ep2_distributed_shared", "qwen2_moe", EP2, DISTRIBUTED),
        case("ep2_full_offload", "qwen3_moe", EP2, FULL, OFFLOAD),
        case("tp2_sp_experts", "qwen3_moe", TP2_SP),
        case("tp2_sp_experts_shared", "qwen2_moe", TP2_SP),
        case("tp2_etp1_ep2_distributed_full", "qwen3_moe", TP2_EP2, DISTRIBUTED, FULL),
        case("cp2_bf16", "qwen3", CP2, BF16),
        case("cp2_full", "qwen3", CP2, FULL),
        case("cp2_core_attn", "llama", CP2, selective("core_attn")),
        case("cp2_distributed", "llama", CP2, DISTRIBUTED),
        case(
            "cp2_ep2_distributed",
            "qwen3_moe",
            {"parallel": {"context": 2, "expert": 2}},
            DISTRIBUTED,
        ),
        case("ep2_core_attn_moe", "qwen3_moe", EP2, selective("core_attn", "moe")),
        case("pp2_experts_uneven", "qwen3_moe", PP2_UNEVEN),
    ],
    4: [
        case(
            "tp2_sp_pp2_full",
            "qwen3",
            {"parallel": {"tensor": 2, "sequence": True, "pipeline": 2}},
            FULL,
        ),
        case(
            "cp2_pp2_ep2",
            "qwen3_moe",
            {"parallel": {"context": 2, "pipeline": 2, "expert": 2}},
            DISTRIBUTED,
        ),
    ],
}
ALL = [pytest.param(size, one, id=one["name"]) for size, cases in CASES.items() for one in cases]
ALL += [
    pytest.param(size, one, id=one["name"], marks=pytest.mark.full)
    for size, cases in MORE.items()
    for one in cases
]


def planned(
    arch: Architecture, config: Config, case: dict[str, Any], size: int, rank: int
) -> dict[str, int]:
    layout = configured_layout(config, arch, size)
    stage = rank // (size // layout.pipeline)
    b = 2 if config.model.dtype == "bf16" else 4
    load = Load(
        tokens=case["tokens"], micro_batches=case["micro_batches"], trainable=case["trainable"],
        dtype_bytes=b,
        composed_norm=True,
    )  # fmt: skip
    weights = rank_weights(arch.shape, layout, stage)
    return {
        "parameters": b * weights.total,
        "gradients": gradient_bytes(weights),
        "optimizer": optimizer_bytes(weights, layout, dtype_bytes=b),
        "activations": training_bytes(arch.shape, layout, load, stage, transient=False),
    }


Measured = Callable[[int, str, int], dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planning")
    torch.manual_seed(0)  # how evenly the routers spread the tokens
    for name, (config, keys) in MODELS.items():
        config = getattr(transformers, config)(**{**SIZES, **keys})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(
            folder / "models" / name
        )
    return folder / "models"


@pytest.fixture(scope="module")
def measured(models: Path) -> Measured:
    """Bytes by (ranks, case, rank); all cases of a world size run at the first use."""
    worlds: dict[Path, list[dict[str, dict[str, Any]]]] = {}

    def of(size: int, name: str, rank: int) -> dict[str, Any]:
        tier = CASES if any(one["name"] == name for one in CASES.get(size, [])) else MORE
        world = models.parent / f"world{size}{'' if tier is CASES else '_more'}"
        if world not in worlds:
            run_ranks(RANKS, size, world, tier[size], deadline_s=240)
            worlds[world] = [
                json.loads((world / f"bytes{k}.json").read_text()) for k in range(size)
            ]
        return worlds[world][rank][name]

    return of


@pytest.mark.parametrize(("size", "case"), ALL)
def test_the_plan_is_within_a_tenth_of_what_a_rank_holds(
    measured: Measured, models: Path, size: int, case: dict[str, Any]
) -> None:
    arch = read_architecture(models / case["model"])
    config = make_config(
        {**case, "optimizer": {"distributed": case.get("distributed", False)}}, models
    )
    each = size // config.policy.parallel.pipeline
    for rank in range(size):
        found = dict(measured(size, case["name"], rank))
        layout = configured_layout(config, arch, size)
        # A plan takes an optimizer without copies to divide for a plain one.
        layout = replace(layout, distributed=case.get("distributed", False))
        assert found.pop("groups") == training_groups(
            layout, moe=bool(arch.num_experts), linked=arch.tie_word_embeddings
        )
        expected = planned(arch, config, case, size, rank)
        # Of the mean rank of its stage: a plan takes tokens as evenly routed, which a router of
        # random weights does not do.
        stage = range(rank // each * each, (rank // each + 1) * each)
        found["activations"] = (
            sum(measured(size, case["name"], k)["activations"] for k in stage) // each
        )
        far = {
            what: (expected[what], found[what])
            for what in found
            if abs(expected[what] / found[what] - 1) > 0.1
        }
        assert not far, f"rank {rank}: (planned, measured) bytes: {far}"
