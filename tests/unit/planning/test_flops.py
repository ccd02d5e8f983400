"""FLOPs and totals of published models, and `perf/mfu`, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from backends.megatron.convert.architecture import weight_tensors
from backends.megatron.convert.read import read_architecture, with_prediction
from rlcore.algorithms import Moments
from rlcore.data.batch import RolloutBatch, UpdateResult
from rlcore.data.packing.plan import MinibatchPlan
from rlcore.planning.devices import peak_flops
from rlcore.planning.shape import ModelShape, RecurrentShape
from rlcore.trainer.step_metrics import Utilization

EXAMPLES = Path(__file__).parents[3] / "examples/models"
TINY = ModelShape(layers=2, hidden=8, heads=4, groups=2, head_dim=3, ffn=5, vocab=11)
# A token meets q [8, 12], k and v [8, 6] each, o [12, 8] and three [8, 5] in each of two layers.
TINY_LAYERS = 2 * (8 * (12 + 6 + 6) + 12 * 8 + 3 * 8 * 5)


def test_kimi_k2_5_has_another_epsilon_and_ramp_than_kimi_k2() -> None:
    """As Moonshot's configurations of the two say; all else of the text models is the same."""
    older, newer = (
        read_architecture(EXAMPLES / name, weights=False) for name in ("Kimi-K2", "Kimi-K2.5")
    )
    assert older.transformer | {"layernorm_epsilon": 1e-5} == newer.transformer
    assert older.transformer["layernorm_epsilon"] == 1e-6
    ropes = {(before, after) for before, after in zip(older.ropes, newer.ropes)}
    ((before, after),) = ropes
    assert before is not None
    assert (before.beta_fast, replace(before, beta_fast=32.0)) == (1.0, after)


def test_the_example_models_have_the_published_number_of_weights() -> None:
    shapes = {
        name: read_architecture(EXAMPLES / name, weights=False).shape
        for name in ("Qwen2.5-7B", "Qwen3-30B-A3B", "Llama-3.1-70B", "Qwen3-Next-80B-A3B")
    }
    assert [shape.parameters for shape in shapes.values()] == [
        7_615_616_512, 30_532_122_624, 70_553_706_496, 79_674_391_296
    ]  # fmt: skip
    # The name "A3B" counts the embedding, which costs no FLOPs: `active_parameters` leaves it out.
    moe = shapes["Qwen3-30B-A3B"]
    active = moe.active_parameters + moe.vocab * moe.hidden
    assert active / 1e9 == pytest.approx(3.35, abs=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Mistral-Nemo-12B", 12.25), ("SmolLM3-3B", 3.08), ("Seed-OSS-36B", 36.15),
        ("Moonlight-16B-A3B", 15.96), ("GLM-4.7-Flash", 29.9), ("Kimi-K2", 1026),
        # without the vision tower
        ("Ministral-3-8B", 8.49), ("Gemma-3-27B", 27.01), ("Gemma-4-31B", 30.7),
        ("Olmo-3-7B", 7.298), ("Kimi-K2.5", 1026), ("DeepSeek-V3", 671),
        ("gpt-oss-20b", 20.91), ("gpt-oss-120b", 116.83), ("MiniMax-M2", 228.7),
        ("Nemotron-3-Nano-30B-A3B", 31.58),
        # without the indexers
        ("DeepSeek-V3.2", 671), ("GLM-5", 743.2),
    ],
)  # fmt: skip
def test_so_have_the_other_families(name: str, billions: float) -> None:
    arch = read_architecture(EXAMPLES / name, weights=False)
    assert arch.shape.parameters / 1e9 == pytest.approx(billions, rel=0.002)
    published = sum(math.prod(shape) for _, shape, _ in weight_tensors(arch, "bfloat16", "lm"))
    # A plan leaves out the bias of the routers.
    assert arch.shape.parameters == pytest.approx(published, rel=1e-4)


@pytest.mark.parametrize("name", ["GLM-4.5-Air", "DeepSeek-V3"])
def test_the_layer_for_multi_token_prediction_has_the_weights_of_its_tensors(name: str) -> None:
    arch = read_architecture(EXAMPLES / name, weights=False)
    predicting = with_prediction(arch)
    sizes = [
        sum(math.prod(shape) for _, shape, _ in weight_tensors(one, "bfloat16", "lm"))
        for one in (arch, predicting)
    ]
    added = predicting.shape.parameters - arch.shape.parameters
    # A plan leaves out the bias of the router.
    assert added == sizes[1] - sizes[0] - arch.num_experts
    assert added > 1e9
    # Scoring passes, and so the balance of ranks, leave it out.
    assert predicting.shape.cost == arch.shape.cost
    *others, last = predicting.shape.layer_kinds()
    assert last.prediction == arch.shape.layer_kinds()[-1]
    assert {layer.prediction for layer in others} == {None}
    parts = [predicting.shape.of_layers(one) for one in (range(3), range(3, arch.num_layers))]
    assert predicting.shape.joined(parts) == predicting.shape


def test_flops_of_multi_token_prediction() -> None:
    """The head's weight and the hidden states get no gradient from it."""
    predicting = replace(TINY, mtp=True)
    assert TINY.prediction_flops([3, 4], 5) == 0
    own = TINY_LAYERS // 2 + 2 * 8 * 8
    attention = 2 * 12 * (9 + 16)
    assert predicting.prediction_flops([3, 4], 5) == (
        3 * (2 * own * 7 + attention) + 2 * (2 * 8 * 11 * 5)
    )
    batch = make_batch()
    meter = Utilization(predicting, 1e6, scores_policy=True)
    assert meter.flops(batch, [[0, 1, 2]], updates(1)) == (
        4 * TINY.forward_flops([4, 3, 5], 7) + predicting.prediction_flops([4, 3, 5], 7)
    )


def test_forward_flops_of_a_dense_model() -> None:
    assert TINY.layer_matrices == TINY_LAYERS
    # layers x (scores and weighted sum: 2 FLOPs for each of 12 numbers), half of n x n
    attention = 2 * (2 * 2 * 12) // 2
    assert TINY.forward_flops([3, 4], 5) == 2 * TINY_LAYERS * 7 + 2 * 8 * 11 * 5 + attention * (
        9 + 16
    )
    assert TINY.forward_flops([], 0) == 0


def test_forward_flops_count_the_chosen_experts_alone() -> None:
    moe = ModelShape(
        layers=2, hidden=8, heads=4, groups=2, head_dim=3, ffn=5, vocab=11, experts=6, topk=2,
        expert_ffn=7, shared_ffn=4, shared_gate=True, expert_layers=(False, True),
    )  # fmt: skip
    one_layer = 2 * 3 * 8 * 7 + 3 * 8 * 4 + 8 * (6 + 1) - 3 * 8 * 5
    assert moe.forward_flops([1], 0) - TINY.forward_flops([1], 0) == 2 * one_layer


def test_a_gated_delta_layer_reads_and_writes_its_state_in_place_of_attention() -> None:
    """One key head of size 3 for two heads of values of size 5; output gates in the other layer."""
    sizes = {
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 3,
        "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4, "hidden_size": 8,
    }  # fmt: skip
    hybrid = replace(
        TINY,
        output_gate=True,
        recurrent=RecurrentShape.of_fields(sizes),
        recurrent_layers=(True, False),
    )
    projections = 8 * (3 + 3 + 10 + 10 + 2 + 2) + 10 * 8
    assert hybrid.layer_matrices == (
        TINY_LAYERS - 8 * (12 + 6 + 6) - 12 * 8 + 8 * 12 + projections + 3 * 2 * 3 * 5
    )
    assert hybrid.cost.quadratic == TINY.cost.quadratic / 2
    own = projections + (3 + 3 + 10) * 4 + 2 + 2 + 5
    attention = 8 * (12 + 6 + 6) + 12 * 8
    assert hybrid.parameters == TINY.parameters - attention + 8 * 12 + own
    parts = [hybrid.of_layers(range(k, k + 1)) for k in range(2)]
    assert sum(part.layer_matrices for part in parts) == hybrid.layer_matrices
    assert hybrid.joined(parts) == hybrid


def test_a_layer_of_one_block_has_one_norm_and_no_other_block() -> None:
    """Mamba-2, attention, and an MLP without a gate."""
    sizes = {
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 3,
        "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4, "hidden_size": 8,
        "mamba_num_heads": 2,
    }  # fmt: skip
    blocks = replace(
        TINY,
        layers=3,
        gated=False,
        recurrent=RecurrentShape.of_fields(sizes),
        recurrent_layers=(True, False, False),
        mlp_layers=(False, False, True),
    )
    projections = 8 * (3 + 3 + 10 + 10 + 2) + 10 * 8
    attention = 8 * (12 + 6 + 6) + 12 * 8
    assert blocks.layer_matrices == projections + 2 * 2 * 3 * 5 + attention + 2 * 8 * 5
    assert blocks.cost.quadratic == TINY.cost.quadratic / 2
    own = (3 + 3 + 10) * (4 + 1) + 3 * 2 + 10
    assert blocks.parameters == (projections + own + attention + 2 * 8 * 5 + 3 * 8 + 8 + 2 * 11 * 8)
    parts = [blocks.of_layers(range(k, k + 1)) for k in range(3)]
    assert sum(part.layer_matrices for part in parts) == blocks.layer_matrices
    assert blocks.joined(parts) == blocks


@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_a_layer_with_a_window_counts_the_keys_that_its_queries_see(length: int) -> None:
    """As n^2 / 2 counts half of a query's own key, so does a query that sees all keys."""
    windowed = replace(TINY, windows=(None, 4))
    positions = torch.arange(length)
    behind = positions[:, None] - positions
    visible = int(((behind >= 0) & (behind < 4)).sum())
    own = min(length, 4)
    # Scores and weighted sum: 2 FLOPs for each of 12 numbers.
    attention = 2 * 2 * 12 * (visible - own / 2 + length**2 / 2)
    expected = 2 * TINY_LAYERS * length + attention
    assert windowed.forward_flops([length], 0) == expected
    assert sum(part.forward_flops([length], 0) for part in windowed.layer_kinds()) == expected
    assert windowed.joined(windowed.layer_kinds()) == windowed
    assert windowed.cost(length) - windowed.cost.linear * length == attention
    assert windowed.cost(np.array([length, 7])).tolist() == [  # type: ignore[arg-type,attr-defined]
        windowed.cost(length), windowed.cost(7)
    ]  # fmt: skip


def test_windows_come_from_the_folder() -> None:
    shape = read_architecture(EXAMPLES / "gpt-oss-20b", weights=False).shape
    assert shape.windows == (128, None) * 12
    # 64 heads of 64 in each of 24 layers
    full = 2.0 * 24 * 64 * 64 * 4096**2
    share = (1 + (2 * 128 * 4096 - 128**2) / 4096**2) / 2
    assert shape.cost.attention(4096) == pytest.approx(full * share, rel=1e-12)


def test_a_plan_and_the_metric_count_alike() -> None:
    """The balance of batches counts the head at every token."""
    assert TINY.forward_flops([9], 9) == TINY.cost(9)


def make_batch() -> RolloutBatch:
    """Three sequences of 4, 3 and 5 tokens, of which 2, 0 and 5 are trainable."""
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1], dtype=torch.bool)
    return RolloutBatch(torch.zeros(12, dtype=torch.int32), torch.tensor([0, 4, 7, 12]), mask, {})


def updates(count: int, *, policy: bool = True) -> list[UpdateResult]:
    return [
        UpdateResult({"lr": 0.1} if policy else {"train/critic_lr": 0.1}, Moments())
        for _ in range(count)
    ]


def test_mfu_counts_the_passes_that_the_policy_made() -> None:
    batch = make_batch()
    minibatches = [[2, 1], [0]]
    first = TINY.forward_flops([5, 3], 5)
    second = TINY.forward_flops([4], 2)
    meter = Utilization(TINY, 1e6, scores_policy=False)
    assert meter.flops(batch, minibatches, updates(2)) == 3 * (first + second)
    assert meter.flops(batch, minibatches, updates(3)) == 3 * (2 * first + second), (
        "a second epoch that ended early"
    )
    assert meter.flops(batch, minibatches, updates(2, policy=False)) == 0, "the critic warms up"
    plans = [MinibatchPlan((((2, 1),),), shared=(2,)), MinibatchPlan((((0,),),))]
    once = TINY.forward_flops([5, 3], 5) - TINY.forward_flops([2], 0)
    assert meter.flops(batch, minibatches, updates(2), plans) == 3 * (once + second), (
        "the second sequence begins with two tokens of the first"
    )
    scoring = Utilization(TINY, 1e6, scores_policy=True)
    assert scoring.flops(batch, minibatches, []) == first + second
    assert scoring.flops(batch, minibatches, updates(2)) == 4 * (first + second)


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989), ("NVIDIA H20", 148), ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500), ("NVIDIA L40S", 362), ("NVIDIA L4", 121), ("NVIDIA A10G", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("Tesla T4", None), ("cpu", None), ("", None),
    ],
)  # fmt: skip
def test_peaks_by_the_names_that_torch_gives(name: str, tflops: int | None) -> None:
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)


SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaConfig": {}, "Qwen2Config": {"tie_word_embeddings": True},
    "Qwen3Config": {"head_dim": 16},
    "Qwen3MoeConfig": {**EXPERTS, "head_dim": 16, "mlp_only_layers": [1]},
    "Qwen2MoeConfig": {**EXPERTS, "shared_expert_intermediate_size": 40},
    "NemotronHConfig": {"num_hidden_layers": None, "mamba_num_heads": 4, "n_groups": 2,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"], "mamba_head_dim": 6,
        "ssm_state_size": 5, "n_routed_experts": 4, "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40, "head_dim": 16},
    "MixtralConfig": {"num_local_experts": 4, "num_experts_per_tok": 2}, "DeepseekV3Config": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0, "n_group": 4, "topk_group": 2},
}  # fmt: skip


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_weight_of_every_family_is_counted(family: str, tmp_path: Path) -> None:
    config = getattr(transformers, family)(**{**SIZES, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    (tmp_path / "config.json").write_text(
        json.dumps({**config.to_dict(), "architectures": [type(model).__name__]})
    )
    assert read_architecture(tmp_path, weights=False).shape.parameters == sum(
        p.numel() for p in model.parameters()
    )
