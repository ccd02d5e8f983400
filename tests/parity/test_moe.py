"""Grouped matmuls of experts, the routers' losses and pads, on every layout.

Experts without either on the layouts: test_covering.py; the other families: test_families.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
from cases import TRAINED
from spawn import Results

MODEL = "qwen3_moe"
AUX = 0.3
Z = 0.05
EP2 = {"expert": 2}
SP2 = {"tensor": 2, "sequence": True}
PP2 = {"pipeline": 2}
CP2 = {"context": 2}
FULL_RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def case(name: str, plan: str = "uneven", **keys: Any) -> dict[str, Any]:
    return {"name": name, "model": MODEL, "plan": plan, **keys}


def with_losses(name: str, plan: str = "uneven", **keys: Any) -> dict[str, Any]:
    losses = {"moe_aux_loss_coeff": AUX, "moe_z_loss_coeff": Z}
    return case(f"losses_{name}", plan, megatron=losses, **keys)


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        case(MODEL, "one", critic=True),
        case("grouped", grouped=True),
        case("grouped_recompute", grouped=True, megatron=FULL_RECOMPUTE),
        with_losses("whole", "one"),
        with_losses("uneven"),
        with_losses("starved_1", "starved_1"),
    ],
    2: [
        case("grouped_ep2", "starved", parallel=EP2, grouped=True, critic=True),
        case("grouped_tp2_sp", parallel=SP2, grouped=True),
        with_losses("ep2", "starved", parallel=EP2),
        with_losses("tp2_sp", parallel=SP2),
        with_losses("pp2", parallel=PP2),
        with_losses("cp2_ep2", parallel={**CP2, **EP2}),
        with_losses("dp2", "starved"),
        with_losses("etp1_ep2", parallel={**SP2, "expert_tensor": 1, "expert": 2}),
        *(
            case(name, "starved", parallel=EP2, optimizer=TRAINED, steps=3, distributed=distributed)
            for name, distributed in (("trained_ep2", False), ("trained_ep2_distributed", True))
        ),
    ],
    4: [
        with_losses("ep2_pp2", "starved", parallel={**EP2, **PP2}),
        with_losses("ep2_tp2_sp", "starved", parallel={**SP2, **EP2}),
        with_losses("tp2_sp_pp2", parallel={**SP2, **PP2}),
    ],
}
EVERY_RUN = (*(one["name"] for one in CASES[1]), "grouped_ep2", "losses_ep2", "losses_tp2_sp",
             "losses_pp2")  # fmt: skip
# Micro-batches decide the auxiliary loss, so each layout is compared with one process that has the
# same ones.
SAME_MICRO_BATCHES = {"uneven": "losses_uneven", "starved": "losses_starved_1"}
EVERY = {one["name"]: one for cases in CASES.values() for one in cases}


def each(kind: str, *but: str) -> list[Any]:
    """The cases whose names begin so, marked."""
    return [
        pytest.param(name, marks=() if name in EVERY_RUN else pytest.mark.full)
        for name in EVERY
        if name.startswith(kind) and name not in but
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity_moe")
    oracle.write_models(path / "models", only={MODEL})
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return Results(folder, CASES, [EVERY_RUN])


def test_one_process_equals_transformers(results: Results, folder: Path) -> None:
    expected = oracle.policy_step(folder / "models" / MODEL)
    got = results[MODEL]
    oracle.check_scores(got["scores"], expected)
    assert any(name.endswith("gate.weight") for name in expected["gradients"])
    oracle.check_gradients(got["gradients"]["policy"], expected["gradients"])


@pytest.mark.parametrize("name", each("grouped"))
def test_grouped_matmuls_equal_one_process_without(name: str, results: Results) -> None:
    got = results[name]
    oracle.check_step(got, results[MODEL])
    assert got["skipped"] == (False, False)


def test_the_losses_of_the_routers_equal_plain_torch(results: Results, folder: Path) -> None:
    expected = oracle.router_step(folder / "models" / MODEL, aux=AUX, z=Z)
    got = results["losses_whole"]
    oracle.check_gradients(got["gradients"]["policy"], expected["gradients"])
    for metric, value in expected["losses"].items():
        assert got["metrics"][metric] == pytest.approx(value, rel=1e-5), metric
    gate = "model.layers.0.mlp.gate.weight"
    plain = results[MODEL]["gradients"]["policy"][gate]
    assert (expected["gradients"][gate] - plain).norm() > 0.1 * plain.norm(), (
        "the losses hardly act"
    )


@pytest.mark.parametrize(
    "name", each("losses", "losses_whole", "losses_uneven", "losses_starved_1")
)
def test_the_losses_of_the_routers_in_every_layout(name: str, results: Results) -> None:
    """Under CP, SP and PP, with pads, an empty micro-batch, and a rank without trainable tokens."""
    got = results[name]
    expected = results[SAME_MICRO_BATCHES[EVERY[name]["plan"]]]
    oracle.check_gradients(got["gradients"]["policy"], expected["gradients"]["policy"])
    for metric in ("train/moe_aux_loss", "train/moe_z_loss", "train/grad_norm"):
        assert got["metrics"][metric] == pytest.approx(expected["metrics"][metric], rel=1e-5), (
            metric
        )


def test_the_z_loss_is_the_same_in_every_split(results: Results) -> None:
    """It is a mean over tokens; the auxiliary loss is not. Those that are off are not reported."""
    one = results["losses_whole"]["metrics"]
    several = results["losses_uneven"]["metrics"]
    assert several["train/moe_z_loss"] == pytest.approx(one["train/moe_z_loss"], rel=1e-5)
    assert several["train/moe_aux_loss"] > one["train/moe_aux_loss"] > 0.5
    assert not any("moe" in metric for metric in results[MODEL]["metrics"])


@pytest.mark.full
@pytest.mark.parametrize("name", each("trained"))
def test_three_steps_of_adamw_equal_torchs(name: str, results: Results, folder: Path) -> None:
    """The norm that clips is that of all weights, experts on every rank among them."""
    expected = oracle.trained(folder / "models" / MODEL, steps=3)
    got = results[name]
    assert got["metrics"]["train/grad_norm"] > TRAINED["clip_grad"], "clipping was not exercised"
    oracle.check_gradients(got["moved"], expected, 1e-4)
