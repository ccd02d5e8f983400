"""The plan's bytes against the unique storages of models really built and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from spawn import run_ranks

from backends.megatron.convert.architecture import read_architecture
from rlcore.planning.memory import (
    Layout,
    Load,
    activation_bytes,
    gradient_bytes,
    optimizer_bytes,
    rank_weights,
)
from rlcore.planning.shape import ModelShape

RANKS = Path(__file__).with_name("memory_ranks.py")
SIZES: dict[str, Any] = {
    "vocab_size": 1001, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
MODELS = {
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "llama": ("LlamaConfig", {}),
    "qwen2_tied": ("Qwen2Config", {"tie_word_embeddings": True}),
}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


USUAL = {"tokens": 256, "trainable": 128, "micro_batches": 2}
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"name": "one", "model": "qwen3"},
        {"name": "one_bf16", "model": "qwen3", "dtype": "bf16"},
        {"name": "llama", "model": "llama"},
        {"name": "qwen2_tied_bf16", "model": "qwen2_tied", "dtype": "bf16"},
        {"name": "full", "model": "qwen3", "megatron": FULL, "recompute": "full"},
        {"name": "core_attn", "model": "qwen3", "megatron": selective("core_attn"), "recompute": "core_attn"},
        {"name": "core_attn_llama", "model": "llama", "megatron": selective("core_attn"), "recompute": "core_attn"},
        {"name": "mlp", "model": "qwen3", "megatron": selective("mlp"), "recompute": "mlp"},
        {"name": "both", "model": "qwen3", "megatron": selective("core_attn", "mlp"), "recompute": "core_attn+mlp"},
    ],
    2: [
        {"name": "tp2", "model": "qwen3", "parallel": {"tensor": 2}},
        {"name": "tp2_sp", "model": "qwen3", "parallel": {"tensor": 2, "sequence": True}},
        {"name": "tp2_sp_full", "model": "qwen3", "parallel": {"tensor": 2, "sequence": True}, "megatron": FULL,
         "recompute": "full"},
        {"name": "pp2", "model": "qwen3", "parallel": {"pipeline": 2}},
        {"name": "pp2_tied", "model": "qwen2_tied", "parallel": {"pipeline": 2}, "micro_batches": 4},
        {"name": "vpp2", "model": "qwen3", "parallel": {"pipeline": 2, "virtual_pipeline": 2}, "micro_batches": 4},
        {"name": "dp2_distributed", "model": "qwen3", "data": 2, "distributed": True},
        {"name": "dp2_distributed_bf16", "model": "llama", "data": 2, "distributed": True, "dtype": "bf16"},
    ],
}  # fmt: skip
ALL = [(size, {**USUAL, **case}) for size, cases in CASES.items() for case in cases]


def planned(shape: ModelShape, case: dict[str, Any], stage: int) -> dict[str, int]:
    layout = Layout(
        **case.get("parallel", {}), data=case.get("data", 1), distributed=case.get("distributed", False),
        recompute=case.get("recompute", "none"),
    )  # fmt: skip
    b = 2 if case.get("dtype") == "bf16" else 4
    load = Load(
        tokens=case["tokens"], micro_batches=case["micro_batches"], trainable=case["trainable"], dtype_bytes=b,
        composed_norm=True,
    )  # fmt: skip
    weights = rank_weights(shape, layout, stage)
    return {
        "parameters": b * weights.total,
        "gradients": gradient_bytes(weights),
        "optimizer": optimizer_bytes(weights, layout, dtype_bytes=b),
        "activations": activation_bytes(shape, layout, load, stage),
    }


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("planning")
    for name, (config, keys) in MODELS.items():
        config = getattr(transformers, config)(**{**SIZES, **keys})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "models" / name)
    worlds: dict[int, list[dict[str, Any]]] = {}

    def of(size: int, name: str, rank: int) -> dict[str, int]:
        if size not in worlds:
            world = folder / f"world{size}"
            run_ranks(RANKS, size, world, [{**USUAL, **case} for case in CASES[size]], deadline_s=150)
            worlds[size] = [json.loads((world / f"bytes{rank}.json").read_text()) for rank in range(size)]
        found: dict[str, int] = worlds[size][rank][name]
        return found

    of.folder = folder / "models"       # type: ignore[attr-defined]
    return of


@pytest.mark.parametrize(("size", "case"), ALL, ids=[case["name"] for _, case in ALL])
def test_the_plan_is_within_a_tenth_of_what_a_rank_holds(measured: Any, size: int, case: dict[str, Any]) -> None:
    shape = read_architecture(measured.folder / case["model"]).shape
    for rank in range(size):
        stage = rank if "pipeline" in case.get("parallel", {}) else 0
        found, expected = measured(size, case["name"], rank), planned(shape, case, stage)
        far = {what: (expected[what], found[what]) for what in found if abs(expected[what] / found[what] - 1) > 0.1}
        assert not far, f"rank {rank}: (planned, measured) bytes: {far}"
