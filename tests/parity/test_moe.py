"""Experts on every layout, with the routers' losses and pads, against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases import TRAINED, relative
from spawn import Results
from torch import Tensor

TIGHT = 1e-5  # relative, over each whole tensor
FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral")
AUX = 0.3
Z = 0.05
LOSSES = {"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}
EP2 = {"expert": 2}
SP2 = {"tensor": 2, "sequence": True}
PP2 = {"pipeline": 2}
CP2 = {"context": 2}
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def case(name: str, model: str = "qwen3_moe", plan: str = "uneven", **keys: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "plan": plan, **keys}


def with_losses(name: str, plan: str, parallel: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return case(name, plan=plan, parallel=parallel, megatron=LOSSES, **keys)


# What `EVERY_RUN` names runs in every tier, the rest with --full.
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        *(case(name, name, "one", critic=name == "qwen3_moe") for name in FAMILIES),
        case("recompute", megatron=FULL_RECOMPUTE),
        case("grouped", grouped=True),
        case("grouped_recompute", grouped=True, megatron=FULL_RECOMPUTE),
        case("losses", plan="one", megatron=LOSSES),
        case("losses_uneven", megatron=LOSSES),
        case("losses_recompute", megatron={**LOSSES, **FULL_RECOMPUTE}),
        case("losses_starved_1", plan="starved_1", megatron=LOSSES),
    ],
    2: [
        case("ep2", plan="starved", parallel=EP2, critic=True),
        case("pp2", parallel=PP2, critic=True),
        case("tp2_sp", parallel=SP2),
        case("grouped_ep2", plan="starved", parallel=EP2, grouped=True, critic=True),
        case("grouped_tp2_sp", parallel=SP2, grouped=True),
        case("tp2_sp_etp1_ep2", parallel={**SP2, "expert_tensor": 1, "expert": 2}),
        with_losses("losses_ep2", "starved", EP2),
        with_losses("losses_tp2_sp", "uneven", SP2),
        with_losses("losses_pp2", "uneven", PP2),
        case("dp2", plan="starved"),
        case("dp2_distributed", plan="dp2", distributed=True),
        case("ep2_distributed", plan="dp2", parallel=EP2, distributed=True),
        case("vpp2", plan="pairs", parallel={"pipeline": 2, "virtual_pipeline": 2}),
        case("ep2_recompute", plan="dp2", parallel=EP2, megatron=FULL_RECOMPUTE),
        *(case(f"{name}_{short}", name, plan, parallel=parallel)
          for name in ("qwen2_moe", "mixtral")
          for short, plan, parallel in (("ep2", "dp2", EP2), ("tp2_sp", "uneven", SP2),
              ("pp2", "uneven", PP2),
                                        ("etp1_ep2", "uneven",
                                         {**SP2, "expert_tensor": 1, "expert": 2}))),
        case("cp2", parallel=CP2),
        case("cp2_ep2", parallel={**CP2, **EP2}, critic=True),
        with_losses("losses_cp2_ep2", "uneven", {**CP2, **EP2}),
        with_losses("losses_dp2", "starved", {}),
        with_losses("losses_etp1_ep2", "uneven", {**SP2, "expert_tensor": 1, "expert": 2}),
        case("trained_ep2", plan="starved", parallel=EP2, optimizer=TRAINED, steps=3),
        case("trained_ep2_distributed", plan="starved", parallel=EP2, distributed=True,
            optimizer=TRAINED, steps=3),
    ],
    4: [
        case("ep2_pp2", plan="starved", parallel={**EP2, **PP2}, critic=True),
        case("ep2_tp2_sp", plan="starved", parallel={**SP2, **EP2}),
        case("ep4", parallel={**SP2, **PP2, "expert_tensor": 1, "expert": 2}),
        case("tp2_sp_pp2", parallel={**SP2, **PP2}),
        case("ep2_dp4", plan="dp4", parallel=EP2, distributed=True),
        with_losses("losses_ep2_pp2", "starved", {**EP2, **PP2}),
        with_losses("losses_ep2_tp2_sp", "starved", {**SP2, **EP2}),
        with_losses("losses_tp2_sp_pp2", "uneven", {**SP2, **PP2}),
        case("qwen2_moe_ep2_pp2", "qwen2_moe", "starved", parallel={**EP2, **PP2}),
    ],
}  # fmt: skip
EVERY_RUN = (
    *(one["name"] for one in CASES[1]), "ep2", "pp2", "tp2_sp", "tp2_sp_etp1_ep2", "losses_ep2",
    "losses_tp2_sp", "losses_pp2",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity_moe")
    oracle.write_models(path / "models", only=FAMILIES)
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return Results(folder, CASES, [EVERY_RUN])


def names(*, losses: bool) -> list[Any]:
    """Cases of several ranks, and of one that are not references themselves."""
    found = []
    for cases in CASES.values():
        for one in cases:
            if (
                one["name"].startswith("losses") == losses
                and one["name"] not in FAMILIES
                and "steps" not in one
            ):
                marks = [] if one["name"] in EVERY_RUN else [pytest.mark.full]
                found.append(pytest.param(one["name"], id=one["name"], marks=marks))
    return found


def of_name(name: str) -> dict[str, Any]:
    return next(one for cases in CASES.values() for one in cases if one["name"] == name)


def check_gradients(
    got: dict[str, Tensor], expected: dict[str, Tensor], bound: float = TIGHT
) -> None:
    assert got.keys() == expected.keys()
    far = {
        name: d for name, want in expected.items() if not (d := relative(got[name], want)) <= bound
    }
    assert not far, f"relative distance of gradients above {bound}: {far}"


@pytest.mark.parametrize("name", FAMILIES)
def test_one_process_equals_transformers(name: str, results: Results, folder: Path) -> None:
    expected = oracle.policy_step(folder / "models" / name)
    got = results[name]
    torch.testing.assert_close(
        got["scores"]["logprobs"].double(), expected["logprobs"], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        got["scores"]["entropy"].double(), expected["entropy"], atol=1e-5, rtol=0
    )
    assert any(name.endswith("gate.weight") for name in expected["gradients"])
    check_gradients(got["gradients"]["policy"], expected["gradients"])


@pytest.mark.parametrize("name", names(losses=False))
def test_every_layout_equals_one_process(name: str, results: Results) -> None:
    got = results[name]
    expected = results[of_name(name)["model"]]
    for key in ("logprobs", "entropy"):
        torch.testing.assert_close(got["scores"][key], expected["scores"][key], atol=1e-5, rtol=0)
    if of_name(name).get("critic"):
        torch.testing.assert_close(
            got["values"]["values"], expected["values"]["values"], atol=1e-5, rtol=0
        )
    for model, gradients in got["gradients"].items():
        check_gradients(gradients, expected["gradients"][model])
    for metric in got["metrics"].keys() - {"perf/shared_tokens"}:  # packs differ in what they share
        assert got["metrics"][metric] == pytest.approx(
            expected["metrics"][metric], rel=1e-4, abs=1e-6
        ), metric
    assert got["skipped"] == (False, False)


def test_the_losses_of_the_routers_equal_plain_torch(results: Results, folder: Path) -> None:
    expected = oracle.router_step(folder / "models" / "qwen3_moe", aux=AUX, z=Z)
    got = results["losses"]
    check_gradients(got["gradients"]["policy"], expected["gradients"])
    for metric, value in expected["losses"].items():
        assert got["metrics"][metric] == pytest.approx(value, rel=1e-5), metric
    gate = "model.layers.0.mlp.gate.weight"
    plain = results["qwen3_moe"]["gradients"]["policy"][gate]
    assert (expected["gradients"][gate] - plain).norm() > 0.1 * plain.norm(), (
        "the losses hardly act"
    )


# Micro-batches decide the auxiliary loss, so each layout is compared with one process that has the
# same ones.
SAME_MICRO_BATCHES = {"uneven": "losses_uneven", "starved": "losses_starved_1"}


@pytest.mark.parametrize(
    "name", [p for p in names(losses=True) if p.id not in ("losses", *SAME_MICRO_BATCHES.values())]
)
def test_the_losses_of_the_routers_in_every_layout(name: str, results: Results) -> None:
    """Under CP, SP and PP, with pads, an empty micro-batch, and a rank without trainable tokens."""
    got = results[name]
    expected = results[SAME_MICRO_BATCHES[of_name(name)["plan"]]]
    check_gradients(got["gradients"]["policy"], expected["gradients"]["policy"])
    for metric in ("train/moe_aux_loss", "train/moe_z_loss", "train/grad_norm"):
        assert got["metrics"][metric] == pytest.approx(expected["metrics"][metric], rel=1e-5), (
            metric
        )


def test_the_z_loss_is_the_same_in_every_split(results: Results) -> None:
    """It is a mean over tokens; the auxiliary loss is not."""
    one = results["losses"]["metrics"]
    several = results["losses_uneven"]["metrics"]
    assert several["train/moe_z_loss"] == pytest.approx(one["train/moe_z_loss"], rel=1e-5)
    assert several["train/moe_aux_loss"] > one["train/moe_aux_loss"] > 0.5


def test_losses_that_are_off_are_not_reported(results: Results) -> None:
    assert not any("moe" in metric for metric in results["qwen3_moe"]["metrics"])


@pytest.mark.full
@pytest.mark.parametrize("name", ["trained_ep2", "trained_ep2_distributed"])
def test_three_steps_of_adamw_equal_torchs(name: str, results: Results, folder: Path) -> None:
    """The norm that clips is that of all weights, experts on every rank among them."""
    expected = oracle.trained(folder / "models" / "qwen3_moe", steps=3)
    got = results[name]
    assert got["metrics"]["train/grad_norm"] > TRAINED["clip_grad"], "clipping was not exercised"
    check_gradients(got["moved"], expected, 1e-4)
