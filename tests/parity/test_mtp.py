"""Multi-token prediction under every kind of parallelism, against torch in float64.

The trunk's gradients are those of the policy's loss alone; the layer's are those of its own loss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mtp_oracle
import oracle
import pytest
import torch
from safetensors.torch import load_file
from spawn import Results

from backends.megatron.convert.read import read_architecture
from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.checkpoint.to_hf import checkpoint_to_hf

SOURCES = {"glm": "glm4_moe", "mimo": "qwen2_tied", "deepseek": "deepseek_v3"}
SP2 = {"tensor": 2, "sequence": True}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2}, "tp2_sp": SP2, "pp2": {"pipeline": 2},
    "vpp2": {"pipeline": 2, "virtual_pipeline": 2}, "cp2": {"context": 2}, "ep2": {"expert": 2},
    "ep2_tp2_sp_etp1": {**SP2, "expert": 2, "expert_tensor": 1},
}  # fmt: skip
PLANS = {"ep2": "dp2", "vpp2": "pairs"}
EXPERTS = ("glm", "deepseek")


def case(name: str, model: str, plan: str = "uneven", **keys: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "plan": plan, "mtp_coef": mtp_oracle.COEF, **keys}


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        *(case(model, model, "one") for model in SOURCES),
        case("kept", "glm", "one", mtp_coef=0, share="off"),
        case("glm-recomputed", "glm", megatron=FULL),
        case("glm-distributed", "glm", distributed=True),
    ],
    2: [
        case("saved", "glm", parallel={"pipeline": 2}, save="saved"),
        case("loaded", "glm", "dp2", parallel={"expert": 2}, load="saved"),
        *(
            case(f"{model}-{layout}", model, PLANS.get(layout, "uneven"), parallel=parallel)
            for model in SOURCES
            for layout, parallel in LAYOUTS.items()
            if (layout != "tp2" if model in EXPERTS else "ep2" not in layout)
        ),
    ],
}
ALONE = ("kept", "saved", "loaded")
EVERY_RUN = (*ALONE, "glm", "mimo", "glm-tp2_sp", "glm-pp2", "glm-cp2", "mimo-pp2", "mimo-tp2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity_mtp") / "models"
    oracle.write_models(path, only=set(SOURCES.values()))
    for name, source in SOURCES.items():
        mtp_oracle.write(path / name, path / source)
    return path


@pytest.fixture(scope="module")
def results(models: Path) -> Results:
    return Results(models.parent, CASES, [EVERY_RUN])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [
    pytest.param(one["name"], marks=() if one["name"] in EVERY_RUN else pytest.mark.full)
    for cases in CASES.values() for one in cases if one["name"] not in ALONE
])  # fmt: skip
def test_a_layout_equals_torch(name: str, results: Results, models: Path) -> None:
    model = name.partition("-")[0]
    expected = mtp_oracle.step(models / model, models / SOURCES[model])
    got = results[name]
    oracle.check_scores(got["scores"], expected)
    oracle.check_gradients(got["gradients"]["policy"], expected["gradients"])
    assert got["metrics"]["loss/mtp_avg"] == pytest.approx(expected["mtp"], rel=1e-5)


def test_clipping_and_the_trunk_do_not_know_of_the_layer(results: Results) -> None:
    """Where it is kept as it is, exports copy its tensors, and no rank has them."""
    kept = results["kept"]
    got = results["glm"]
    assert got["metrics"]["train/grad_norm"] == kept["metrics"]["train/grad_norm"]
    assert "loss/mtp_avg" not in kept["metrics"]
    for name, gradient in kept["gradients"]["policy"].items():
        assert torch.equal(gradient, got["gradients"]["policy"][name]), name
    assert got["gradients"]["policy"].keys() - kept["gradients"]["policy"].keys()
    assert got["predicting"] == {"policy": True, "reference": False}


def test_a_checkpoint_holds_the_layer_in_every_layout(
    results: Results, models: Path, tmp_path: Path
) -> None:
    saved = results["saved"]["after"]
    loaded = results["loaded"]["before"]
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, loaded[name]), name
    arch = read_architecture(models / "glm")
    checkpoint_to_hf(models.parent / "saved", tmp_path / "hf", arch, dtype=torch.float32)
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    stored = load_file(models / "glm" / "model.safetensors")
    assert exported.keys() == stored.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, exported[name]), name
    trained = {name for name in saved if name.startswith(mtp_oracle.NEXTN[0])}
    moved = {name for name in trained if not torch.equal(exported[name], stored[name])}
    assert trained - moved == {name for name in trained if name.endswith("correction_bias")}
