"""Adapters under every kind of parallelism, against autograd of W + scale B A and against PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lora_oracle
import oracle
import pytest
import torch
from cases import TRAINED
from safetensors.torch import load_file
from spawn import Results
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from backends.megatron.convert.read import read_architecture
from backends.megatron.cpu.shim import importing_megatron
from rlcore.config.sections.policy import LoraConfig

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LATENT = [*ALL[3:], "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
DELTA = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
# One matrix of three parts, whose rows a layer has head by head.
DELTA_OF_PARTS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
MIXTRAL = [*ALL[:4], "w1", "w2", "w3"]
PARTS = ["q_proj", "v_proj", "up_proj"]  # of fused layers
# model -> (targets, rank of experts)
ADAPTERS: dict[str, tuple[list[str], int]] = {
    "qwen3": (ALL, 0), "qwen3_mqa": (ALL, 0), "qwen3_tied": (ALL, 0), "qwen2_tied": (ALL, 0),
    "llama": (PARTS, 0),
    "qwen3_moe": (ALL, 4), "qwen2_moe": (ALL, 3), "mixtral": (MIXTRAL, 2),
    "deepseek_v3": (LATENT, 2), "qwen3_next": ([*ALL, *DELTA], 2),
    "qwen3_5_tied": ([*ALL, *DELTA_OF_PARTS], 0),
}  # fmt: skip
DENSE = ("qwen3", "qwen3_tied", "qwen2_tied", "llama", "qwen3_5_tied")
SP2 = {"tensor": 2, "sequence": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}


def case(
    layout: str, model: str, parallel: dict[str, Any], plan: str = "uneven", **keys: Any
) -> dict[str, Any]:
    targets, expert_rank = ADAPTERS[model]
    lora = {"rank": lora_oracle.RANK, "alpha": lora_oracle.ALPHA, "targets": targets,
        "expert_rank": expert_rank, "path": f"{model}_adapter"}  # fmt: skip
    return {"name": f"{model}-{layout}", "model": model, "parallel": parallel, "plan": plan,
        "lora": lora, **keys}  # fmt: skip


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        *(case("one", model, {}, "one") for model in ADAPTERS),
        case("recomputed", "qwen3", {}, megatron=FULL),
        case("recomputed_parts", "qwen3", {}, megatron=CORE),
        case("grouped", "qwen3_moe", {}, "one", grouped=True),
        case("critic", "qwen3", {}, "one", critic=True),
        case("three_steps", "qwen3_tied", {}, "one", steps=3, optimizer=TRAINED),
        case("three_steps", "qwen3_moe", {}, "one", steps=3, optimizer=TRAINED),
        case("three_steps", "qwen3_5_tied", {}, "one", steps=3, optimizer=TRAINED),
        case("resumed", "qwen3_5_tied", {}, "one", load="qwen3_5_tied_saved", optimizer=TRAINED),
        case("resumed", "qwen3_tied", {}, "one", load="qwen3_tied_saved", optimizer=TRAINED),
        case("resumed", "qwen3_moe", {}, "one", load="qwen3_moe_saved", optimizer=TRAINED),
    ],
    2: [
        *(
            case(layout, model, parallel, plan)
            for model in ("qwen3", "qwen3_tied", "llama")
            for layout, parallel, plan in (
                ("tp2", {"tensor": 2}, "uneven"),
                ("tp2_sp", SP2, "uneven"),
                ("pp2", {"pipeline": 2}, "uneven"),
                ("vpp2", {"pipeline": 2, "virtual_pipeline": 2}, "pairs"),
                ("cp2", {"context": 2}, "uneven"),
            )
        ),
        case("dp2_distributed", "qwen3", {}, "starved", distributed=True),
        case("dp2", "qwen3", {}, "starved"),
        case("tp2_sp_recomputed", "qwen3", SP2, megatron=FULL),
        case("tp2_sp", "qwen2_tied", SP2),
        case("tp2_sp", "qwen3_mqa", SP2),
        case("tp2_sp", "qwen3_next", SP2),
        case("tp2_sp", "qwen3_5_tied", SP2),
        case("cp2", "qwen3_5_tied", {"context": 2}),
        case("saved", "qwen3_5_tied", SP2, steps=2, optimizer=TRAINED, save="qwen3_5_tied_saved"),
        case("critic_tp2_sp", "qwen3", SP2, critic=True),
        case("saved", "qwen3_tied", SP2, steps=2, optimizer=TRAINED, save="qwen3_tied_saved"),
        case(
            "saved",
            "qwen3_moe",
            {"expert": 2},
            "dp2",
            steps=2,
            optimizer=TRAINED,
            distributed=True,
            save="qwen3_moe_saved",
        ),
        *(
            case(layout, model, parallel, plan, **keys)
            for model in ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3")
            for layout, parallel, plan, keys in (
                ("ep2", {"expert": 2}, "dp2", {}),
                ("ep2_distributed", {"expert": 2}, "dp2", {"distributed": True}),
                ("tp2_sp_etp2", SP2, "uneven", {}),
                ("tp2_sp_ep2", {**SP2, "expert": 2, "expert_tensor": 1}, "uneven", {}),
                ("pp2", {"pipeline": 2}, "uneven", {}),
                ("cp2", {"context": 2}, "uneven", {}),
            )
        ),
    ],
    4: [
        case("tp2_sp_pp2", "qwen3_tied", {**SP2, "pipeline": 2}),
        case("tp2_sp_dp2", "qwen3", SP2, "starved", distributed=True),
        # Two ranks hold a KV head.
        case("tp4", "llama", {"tensor": 4}),
        case("tp4_sp_recomputed", "qwen3", {"tensor": 4, "sequence": True}, megatron=FULL),
        case(
            "tp4_resumed", "qwen3_tied", {"tensor": 4}, optimizer=TRAINED, load="qwen3_tied_saved"
        ),
        case("tp2_sp_ep2_etp2", "qwen3_moe", {**SP2, "expert": 2}, "starved"),
        case(
            "resumed_elsewhere",
            "qwen3_tied",
            {"pipeline": 2},
            "dp2",
            optimizer=TRAINED,
            distributed=True,
            load="qwen3_tied_saved",
        ),
    ],
}
EVERY_RUN = (
    *(one["name"] for one in CASES[1] if "load" not in one),
    "qwen3-tp2", "qwen3-tp2_sp", "qwen3_mqa-tp2_sp", "llama-tp2_sp",
    "qwen3_next-tp2_sp", "qwen3_5_tied-tp2_sp", "qwen3_5_tied-saved",
    "qwen3_tied-pp2", "qwen3-vpp2", "qwen3-cp2", "qwen3-dp2_distributed", "qwen3-tp2_sp_recomputed",
    "qwen3-critic_tp2_sp", "qwen3_moe-ep2_distributed", "qwen3_moe-tp2_sp_etp2",
    "deepseek_v3-tp2_sp_etp2", "deepseek_v3-tp2_sp_ep2", "qwen3_tied-saved", "qwen3_moe-saved",
)  # fmt: skip
SAVED = ("three_steps", "saved", "resumed", "resumed_elsewhere", "tp4_resumed")
NAMES = [
    one["name"]
    for cases in CASES.values()
    for one in cases
    if one["name"].partition("-")[2] not in SAVED
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity_lora") / "models"
    oracle.write_models(path, only={*ADAPTERS, "qwen3_other"})
    for name, (targets, expert_rank) in ADAPTERS.items():
        lora_oracle.write_adapter(path / name, path / f"{name}_adapter", targets, expert_rank)
    return path


@pytest.fixture(scope="module")
def results(models: Path) -> Results:
    resumed = [f"{model}-resumed" for model in ("qwen3_tied", "qwen3_moe", "qwen3_5_tied")]
    return Results(models.parent, CASES, [EVERY_RUN, resumed])


@pytest.fixture(scope="module")
def expected(models: Path) -> dict[str, Any]:
    return {
        name: lora_oracle.by_definition(models / name, models / f"{name}_adapter")
        for name in ADAPTERS
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.full) for name in NAMES],
)
def test_a_layout_equals_autograd(
    name: str, results: Results, expected: dict[str, Any], models: Path
) -> None:
    model = name.partition("-")[0]
    want = expected[model]
    got = results[name]
    # Few tokens reach some of Qwen3-Next's experts, and gated delta rules cancel.
    bound = oracle.TIGHT * (2 if model in ("qwen3_next", "qwen3_5_tied") else 1)
    oracle.check_scores(got["scores"], want, bound)
    stored = load_file(models / f"{model}_adapter" / "adapter_model.safetensors")
    assert got["gradients"]["policy"].keys() == {
        key.removeprefix(lora_oracle.PREFIX) for key in stored
    }
    oracle.check_gradients(got["gradients"]["policy"], want["gradients"], bound)
    whole = torch.stack([gradient.norm() for gradient in want["gradients"].values()]).norm()
    assert got["metrics"]["train/grad_norm"] == pytest.approx(float(whole), rel=oracle.TIGHT)


# which peft calls
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("name", DENSE)
def test_autograd_equals_peft(name: str, expected: dict[str, Any], models: Path) -> None:
    by_peft = lora_oracle.by_peft(models / name, models / f"{name}_adapter")
    for key in ("logprobs", "entropy"):
        torch.testing.assert_close(by_peft[key], expected[name][key], atol=1e-10, rtol=0)
    oracle.check_gradients(expected[name]["gradients"], by_peft["gradients"], 1e-10)
    merged = {key: expected[name]["merged"][key] for key in by_peft["merged"]}
    oracle.check_gradients(merged, by_peft["merged"], 1e-10)
    off = by_peft["off"]["logprobs"]
    torch.testing.assert_close(off, expected[name]["off"]["logprobs"], atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("qwen3_tied-saved", "qwen3_tied-resumed"),
        ("qwen3_moe-saved", "qwen3_moe-resumed"),
        ("qwen3_5_tied-saved", "qwen3_5_tied-resumed"),
        pytest.param("qwen3_tied-saved", "qwen3_tied-resumed_elsewhere", marks=pytest.mark.full),
        pytest.param("qwen3_tied-saved", "qwen3_tied-tp4_resumed", marks=pytest.mark.full),
    ],
)
def test_a_checkpoint_goes_on_under_another_layout(
    saved: str, resumed: str, results: Results
) -> None:
    """Saved after two steps; the third one is that of a run that never stopped."""
    before = results[saved]
    after = results[resumed]
    assert all(torch.equal(after["before"][name], x) for name, x in before["after"].items())
    whole = results[f"{saved.partition('-')[0]}-three_steps"]
    for name, want in whole["after"].items():
        moved = want - before["after"][name]
        assert oracle.relative(after["after"][name] - before["after"][name], moved) < 1e-3, name


@pytest.mark.parametrize("name", ["qwen3-tp2_sp", "qwen3_5_tied-tp2_sp", "qwen3_5_tied-saved"])
def test_merged_weights_have_the_products_of_the_factors(
    name: str, results: Results, models: Path
) -> None:
    model = name.partition("-")[0]
    want = with_products(load_file(models / model / "model.safetensors"), results[name]["after"])
    got = results[name]["merged"]
    assert got.keys() == want.keys()
    oracle.check_gradients(got, want, 1e-6)


@pytest.mark.parametrize("merged", [False, True])
def test_so_have_those_that_are_made_from_a_checkpoint(
    merged: bool, results: Results, models: Path, tmp_path: Path
) -> None:
    saved = results["qwen3_5_tied-saved"]["after"]
    arch = read_architecture(models / "qwen3_5_tied")
    lora = LoraConfig(
        rank=lora_oracle.RANK, alpha=lora_oracle.ALPHA, targets=[*ALL, *DELTA_OF_PARTS]
    )
    with importing_megatron():
        from backends.megatron.checkpoint.to_hf import checkpoint_to_hf
    checkpoint_to_hf(
        models.parent / "qwen3_5_tied_saved", tmp_path / "hf", arch,
        dtype=torch.float32, lora=lora, merged=merged,
    )  # fmt: skip
    if not merged:
        stored = load_file(tmp_path / "hf" / "adapter_model.safetensors")
        found = {name.removeprefix(lora_oracle.PREFIX): x for name, x in stored.items()}
        assert found.keys() == saved.keys()
        assert all(torch.equal(found[name], saved[name]) for name in found)
        return
    base = load_file(models / "qwen3_5_tied" / "model.safetensors")
    oracle.check_gradients(
        load_file(tmp_path / "hf" / "model.safetensors"), with_products(base, saved), 1e-6
    )


def with_products(weights: dict[str, Any], factors: dict[str, Any]) -> dict[str, Any]:
    """W + scale B A, for each matrix with factors."""
    found = dict(weights)
    for name, a in factors.items():
        if name.endswith("lora_A.weight"):
            b = factors[name.replace("lora_A", "lora_B")]
            weight = name.replace("lora_A.", "")
            found[weight] = weights[weight] + lora_oracle.ALPHA / len(a) * b @ a
    return found


def test_a_checkpoint_holds_the_adapters_alone(results: Results, models: Path) -> None:
    assert results["qwen3_tied-saved"]
    folder = models.parent / "qwen3_tied_saved" / "policy"
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    named = {name for name, kind in stored.items() if isinstance(kind, TensorStorageMetadata)}
    factors = load_file(models / "qwen3_tied_adapter" / "adapter_model.safetensors")
    keys = {f"adapters.{name.removeprefix(lora_oracle.PREFIX)}" for name in factors}
    moments = {
        f"optimizer.state.{kind}.{key}" for kind in ("exp_avg", "exp_avg_sq") for key in keys
    }
    assert named == keys | moments
