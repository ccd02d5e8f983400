"""Every family under every kind of parallelism, against transformers in float64.

GLM-4.5 is Glm4Moe of transformers. Families that it lacks, and language models inside larger
models, are other folders of a family that it has (`RENAMED`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from safetensors.torch import load_file, save_file
from spawn import Results

# The family of the same weights, fields of the outer `config.json`, the object that holds the inner
# one, and the beginning of the tensors' names.
RENAMED: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "mimo": ("qwen2_tied", {"architectures": ["MiMoForCausalLM"], "model_type": "mimo",
        "num_nextn_predict_layers": 1, "attention_bias": True}, "", ""),
    "kimi_k2": ("deepseek_v3", {"model_type": "kimi_k2"}, "", ""),
    "kimi_k25": ("deepseek_v3", {"model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"]}, "text_config", "language_model."),
    "mistral3": ("ministral3", {"model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"]}, "text_config", "language_model."),
    "gemma4": ("gemma4_text", {"model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"]}, "text_config", "model.language_"),
    "gemma3": ("gemma3_text", {"model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"]}, "text_config", "language_model."),
}  # fmt: skip
CARRIED = {"mimo": "model.mtp_layers.0.input_proj.weight", "kimi_k25": "vision_tower.x",
           "gemma3": "vision_tower.x", "gemma4": "model.vision_tower.x",
           "mistral3": "multi_modal_projector.norm.weight"}  # fmt: skip
DENSE = (
    "gemma3_text", "gemma3", "gemma4_text", "gemma4", "llama", "qwen2_tied", "qwen3",
    "qwen3_tied", "mimo", "mistral", "ministral3", "mistral3", "olmo3", "seed_oss", "smollm3",
    "qwen3_5_tied", "nemotron_h_dense",
)  # fmt: skip
LATENT = (
    "deepseek_v3", "deepseek_v3_plain", "deepseek_v32", "glm_moe_dsa", "glm4_moe_lite", "kimi_k2",
    "kimi_k25",
)  # fmt: skip
MIXED = ("qwen3_next", "qwen3_5_moe", "nemotron_h")
EXPERTS = (
    *MIXED, "qwen2_moe", "qwen3_moe", "mixtral", *LATENT, "glm4_moe", "minimax_m2", "gpt_oss"
)  # fmt: skip
OTHER = "deepseek_v3_other"
BIAS = "e_score_correction_bias"
SP2 = {"tensor": 2, "sequence": True}
CP2 = {"context": 2}
# One KV head, which is divided with its gates.
DIVIDED = "qwen3_5_mqa"
FULL = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
RECOMPUTED = {
    "nemotron_h": {**CORE, "recompute_modules": ["core_attn", "moe", "shared_experts"]},
    "nemotron_h_dense": {**CORE, "recompute_modules": ["core_attn", "mlp"]},
}
LOSSES = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2}, "tp2_sp": SP2, "pp2": {"pipeline": 2},
    "vpp2": {"pipeline": 2, "virtual_pipeline": 2}, "cp2": CP2, "ep2": {"expert": 2},
    "cp2_ep2": {**CP2, "expert": 2}, "ep2_tp2_sp_etp1": {**SP2, "expert": 2, "expert_tensor": 1},
}  # fmt: skip
PLANS = {"ep2": "dp2", "vpp2": "pairs"}  # of the other layouts: uneven


def case(name: str, model: str, plan: str = "uneven", **keys: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "plan": plan, **keys}


# Megatron does not train experts under TP without SP; dense models have none to deal out.
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        *(case(model, model, "one") for model in (*DENSE, *EXPERTS)),
        case("other_reference", LATENT[0], reference=OTHER),
        case("parked_reference", LATENT[0], reference=OTHER, offload=True),
        case("losses", LATENT[0], megatron=LOSSES),
        *(case(f"{model}-full", model, "one", megatron=FULL) for model in MIXED),
        *(case(f"{model}-alone", model, "alone") for model in MIXED),
        *(case(f"{model}-core", model, "one", megatron=it) for model, it in RECOMPUTED.items()),
    ],
    2: [
        *(
            case(f"{model}-{layout}", model, PLANS.get(layout, "uneven"), parallel=parallel)
            for model in (*DENSE, *EXPERTS)
            for layout, parallel in LAYOUTS.items()
            if (layout != "tp2" if model in EXPERTS else "ep2" not in layout)
            # Its experts have biases, which tensor-parallel ranks of an expert would repeat.
            and (model, layout) != ("gpt_oss", "tp2_sp")
        ),
        case(f"{DIVIDED}-tp2", DIVIDED, parallel={"tensor": 2}, megatron=CORE),
        case(f"{DIVIDED}-tp2_sp", DIVIDED, parallel=SP2, megatron=CORE),
        case("losses_cp2", LATENT[0], parallel=CP2, megatron=LOSSES),
        case("losses_tp2_sp", LATENT[0], parallel=SP2, megatron=LOSSES),
    ],
    # of experts without latent attention: test_covering.py
    4: [
        case(f"{LATENT[0]}-tp2_sp_cp2", LATENT[0], parallel={**SP2, **CP2}),
        *(
            case(f"{model}-tp2_sp_cp2", model, parallel={**SP2, **CP2})
            for model in ("qwen3_next", "nemotron_h")
        ),
        case(f"{LATENT[0]}-tp2_sp_pp2", LATENT[0], parallel={**SP2, "pipeline": 2}),
        case(f"{LATENT[0]}-ep2_pp2", LATENT[0], "starved", parallel={"expert": 2, "pipeline": 2}),
        case(f"{LATENT[0]}-tp2_sp_ep2", LATENT[0], "starved", parallel={**SP2, "expert": 2}),
    ],
}
# One process of every family that test_parity.py and test_moe.py do not have; the others with
# --full.
EVERY_RUN = (
    *LATENT, "qwen3_5_tied", *MIXED, "qwen3_next-full", "qwen3_5_tied-pp2", "qwen3_5_mqa-tp2",
    "nemotron_h_dense", "nemotron_h_dense-tp2_sp", "nemotron_h-cp2_ep2", "nemotron_h-pp2",
    "qwen3_next-cp2", "qwen3_5_moe-ep2_tp2_sp_etp1", "mimo", "glm4_moe", "qwen2_moe", "mixtral",
    "minimax_m2", "gpt_oss", "gemma3_text", "gemma3-tp2_sp",
    "olmo3", "olmo3-tp2_sp", "gemma4_text", "gemma4_text-tp2_sp", "gemma4-pp2",
    "other_reference", "losses", "mistral",
    "ministral3", "mistral3", "seed_oss", "smollm3", "smollm3-pp2", "mistral3-tp2_sp",
    "ministral3-cp2",
    "deepseek_v3-ep2", "deepseek_v3-tp2_sp", "deepseek_v3-cp2", "deepseek_v3-pp2", "mimo-pp2",
    "glm4_moe-ep2_tp2_sp_etp1", "minimax_m2-tp2_sp", "gpt_oss-ep2_tp2_sp_etp1",
    "losses_cp2",
)  # fmt: skip
ALONE = ("other_reference", "parked_reference", "losses", "losses_cp2", "losses_tp2_sp")


def each(*names: str) -> list[Any]:
    """The cases as parameters of a test, marked."""
    return [
        pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.full) for name in names
    ]


def write_renamed(name: str, models: Path) -> None:
    """A folder with a family's weights under other names, with a tensor that is not the model's."""
    source, fields, within, prefix = RENAMED[name]
    config = json.loads((models / source / "config.json").read_text())
    (models / name).mkdir()
    whole = {within: config, **fields} if within else {**config, **fields}
    (models / name / "config.json").write_text(json.dumps(whole))
    tensors = load_file(models / source / "model.safetensors")
    renamed = {prefix + key: tensor for key, tensor in tensors.items()}
    if name in CARRIED:
        renamed[CARRIED[name]] = torch.zeros(2, 2)
    save_file(renamed, models / name / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity_families") / "models"
    oracle.write_models(path, only={*DENSE, DIVIDED, *EXPERTS, OTHER} - RENAMED.keys())
    for name in RENAMED:
        write_renamed(name, path)
    return path


@pytest.fixture(scope="module")
def results(models: Path) -> Results:
    return Results(models.parent, CASES, [EVERY_RUN])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    each(*(one["name"] for cases in CASES.values() for one in cases if one["name"] not in ALONE)),
)
def test_a_layout_equals_transformers(name: str, results: Results, models: Path) -> None:
    model = name.partition("-")[0]
    source, _, _, prefix = RENAMED.get(model, (model, {}, "", ""))
    expected = oracle.policy_step(models / source)
    got = results[name]
    oracle.check_scores(got["scores"], expected)
    assert all(key.startswith(prefix) for key in got["gradients"]["policy"])
    gradients = {key.removeprefix(prefix): g for key, g in got["gradients"]["policy"].items()}
    oracle.check_gradients(gradients, expected["gradients"])
    # Each weight counts once in the norm, whichever ranks hold it.
    squares = sum(gradient.double().square().sum() for gradient in expected["gradients"].values())
    assert got["metrics"]["train/grad_norm"] == pytest.approx(float(squares) ** 0.5, rel=1e-4)


@pytest.mark.parametrize("name", each("losses_cp2", "losses_tp2_sp"))
def test_losses_of_sigmoid_routers_are_those_of_one_process(name: str, results: Results) -> None:
    got = results[name]
    expected = results["losses"]
    oracle.check_gradients(got["gradients"]["policy"], expected["gradients"]["policy"])
    for metric in ("train/moe_aux_loss", "train/moe_z_loss"):
        assert got["metrics"][metric] == pytest.approx(expected["metrics"][metric], rel=1e-5)


@pytest.mark.parametrize("name", each("other_reference", "parked_reference"))
def test_a_reference_routes_by_its_own_bias(name: str, results: Results, models: Path) -> None:
    """Also where its weights wait in host memory and are swapped into the policy for a pass."""
    expected = oracle.policy_step(models / OTHER)["logprobs"]
    oracle.check_scores(results[name]["reference"], {"logprobs": expected})
    one, other = (
        load_file(models / folder / "model.safetensors")[f"model.layers.2.mlp.gate.{BIAS}"]
        for folder in (LATENT[0], OTHER)
    )
    assert not torch.equal(one, other)
