"""Latent attention and sigmoid routers on every layout, against transformers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases import relative
from safetensors.torch import load_file
from spawn import Results
from torch import Tensor

TIGHT = 1e-5  # relative, over each whole tensor
MODELS = ("deepseek_v3", "deepseek_v3_plain")
BIAS = "e_score_correction_bias"
EP2 = {"expert": 2}
SP2 = {"tensor": 2, "sequence": True}
PP2 = {"pipeline": 2}
CP2 = {"context": 2}
LOSSES = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.05}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTED = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}


def case(
    name: str, model: str = "deepseek_v3", plan: str = "uneven", **keys: Any
) -> dict[str, Any]:
    return {"name": name, "model": model, "plan": plan, **keys}


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        *(case(name, name, "one", critic=name == "deepseek_v3") for name in MODELS),
        case("other_reference", reference="deepseek_v3_other"),
        case("parked_reference", reference="deepseek_v3_other", offload=True),
        case("recompute", megatron=RECOMPUTE),
        case("selected", megatron=SELECTED),
        case("losses", megatron=LOSSES),
    ],
    2: [
        case("ep2", plan="starved", parallel=EP2, critic=True),
        case("pp2", parallel=PP2),
        case("tp2_sp", parallel=SP2, critic=True),
        case("cp2", parallel=CP2),
        case("losses_cp2", parallel=CP2, megatron=LOSSES),
        case("losses_tp2_sp", parallel=SP2, megatron=LOSSES),
        case("tp2_sp_etp1_ep2", parallel={**SP2, "expert_tensor": 1, "expert": 2}),
        case("tp2_sp_selected", parallel=SP2, megatron=SELECTED),
        case("vpp2", plan="pairs", parallel={**PP2, "virtual_pipeline": 2}),
        case("dp2_distributed", plan="dp2", distributed=True),
        case("cp2_ep2", parallel={**CP2, **EP2}),
        *(case(f"plain_{short}", "deepseek_v3_plain", plan, parallel=parallel)
          for short, plan, parallel in (("ep2", "dp2", EP2), ("tp2_sp", "uneven", SP2),
              ("pp2", "uneven", PP2),
                                        ("cp2", "uneven", CP2))),
    ],
    4: [
        case("tp2_sp_cp2", parallel={**SP2, **CP2}),
        case("tp2_sp_pp2", parallel={**SP2, **PP2}),
        case("ep2_pp2", plan="starved", parallel={**EP2, **PP2}),
        case("tp2_sp_ep2", plan="starved", parallel={**SP2, **EP2}),
    ],
}  # fmt: skip
EVERY_RUN = (*MODELS, "other_reference", "selected", "ep2", "tp2_sp", "cp2", "pp2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity_latent") / "models"
    oracle.write_models(path, only=(*MODELS, "deepseek_v3_other"))
    return path


@pytest.fixture(scope="module")
def results(models: Path) -> Results:
    return Results(models.parent, CASES, [EVERY_RUN])


def of_name(name: str) -> dict[str, Any]:
    return next(one for cases in CASES.values() for one in cases if one["name"] == name)


def names() -> list[Any]:
    """All but the references, those of the fast tier unmarked."""
    every = [
        one["name"]
        for cases in CASES.values()
        for one in cases
        if one["name"] not in (*MODELS, "losses")
    ]
    return [
        pytest.param(name, marks=[] if name in EVERY_RUN else pytest.mark.full) for name in every
    ]


def check_gradients(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Gradients are within the bound; the bias of a router gets none, and no step moves it."""
    biases = {name for name in got if name.endswith(BIAS)}
    assert biases
    assert not any(got[name].count_nonzero() for name in biases)
    assert got.keys() - biases == expected.keys() - biases
    far = {
        name: d
        for name, want in expected.items()
        if name not in biases and not (d := relative(got[name], want)) <= TIGHT
    }
    assert not far, f"relative distance of gradients above {TIGHT}: {far}"


@pytest.mark.parametrize("name", MODELS)
def test_one_process_equals_transformers(name: str, results: Results, models: Path) -> None:
    expected = oracle.policy_step(models / name)
    got = results[name]
    torch.testing.assert_close(
        got["scores"]["logprobs"].double(), expected["logprobs"], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        got["scores"]["entropy"].double(), expected["entropy"], atol=1e-5, rtol=0
    )
    check_gradients(got["gradients"]["policy"], expected["gradients"])


@pytest.mark.parametrize("name", names())
def test_every_layout_equals_one_process(name: str, results: Results) -> None:
    losses = name.startswith("losses")  # of the routers: they depend on the micro-batches
    got = results[name]
    expected = results["losses" if losses else of_name(name)["model"]]
    for key in ("logprobs", "entropy"):
        torch.testing.assert_close(got["scores"][key], expected["scores"][key], atol=1e-5, rtol=0)
    if of_name(name).get("critic"):
        torch.testing.assert_close(
            got["values"]["values"], expected["values"]["values"], atol=1e-5, rtol=0
        )
    for model, gradients in got["gradients"].items():
        check_gradients(gradients, expected["gradients"][model])
    for metric in ("train/moe_aux_loss", "train/moe_z_loss") if losses else ():
        assert got["metrics"][metric] == pytest.approx(expected["metrics"][metric], rel=1e-5)


@pytest.mark.parametrize(
    "name", ["other_reference", pytest.param("parked_reference", marks=pytest.mark.full)]
)
def test_a_reference_routes_by_its_own_bias(name: str, results: Results, models: Path) -> None:
    """Also where its weights wait in host memory and are swapped into the policy for a pass."""
    expected = oracle.policy_step(models / "deepseek_v3_other")["logprobs"]
    torch.testing.assert_close(
        results[name]["reference"]["logprobs"].double(), expected, atol=1e-5, rtol=0
    )
    one, other = (
        load_file(models / folder / "model.safetensors")
        for folder in ("deepseek_v3", "deepseek_v3_other")
    )
    bias = f"model.layers.2.mlp.gate.{BIAS}"
    assert not torch.equal(one[bias], other[bias])
