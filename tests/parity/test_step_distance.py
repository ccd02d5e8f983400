"""How far a step moved the policy, under every layout, against transformers in float64.

The weights are those from before and after the step; the tokens those of each replica's fullest
micro-batch in the mini-batch that is trained first.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases import PLANS, TRAINED, make_batch
from spawn import Results
from torch import Tensor

from rlcore.data.batch import ragged_index

PP2 = {"pipeline": 2}
VPP2 = {"pipeline": 2, "virtual_pipeline": 2}
SP2 = {"tensor": 2, "sequence": True}
HALVES = ["half0", "half1"]


def case(name: str, plan: str | list[str], **keys: Any) -> dict[str, Any]:
    """Without log-probs from before the step, unless a case has several mini-batches."""
    on_policy = {} if isinstance(plan, list) else {"leave_out": ["old_logprobs"]}
    given = {"model": "qwen3", "optimizer": TRAINED, "distance": True, **on_policy, **keys}
    return {"name": name, "plan": plan, **given}


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        case("one", "uneven"),
        case("steps_3", "uneven", steps=3),
        case("epochs_2", HALVES, updates=[0, 1, 0, 1]),
        case("from_half_1", HALVES, updates=[1]),
        case("with_critic", "one", critic=True),
        case("experts", "uneven", model="qwen3_moe"),
        case("not_finite", "uneven", poison=True),
    ],
    2: [
        case("tp2_sp", "uneven", parallel=SP2),
        case("pp2", "uneven", parallel=PP2),
        case("pp2_steps_3", "uneven", parallel=PP2, steps=3),
        case("vpp2", "pairs", parallel=VPP2),
        case("cp2", "uneven", parallel={"context": 2}),
        case("dp2", "dp2"),
        case("dp2_starved", "starved", distributed=True),
        case("dp2_overlap", "dp2", distributed=True, optimizer={**TRAINED, "overlap": True}),
        case("dp2_epochs_2", ["dp2_half0", "dp2_half1"], updates=[0, 1, 0, 1]),
        case("ep2", "starved", model="qwen3_moe", parallel={"expert": 2}),
        case("pp2_not_finite", "uneven", parallel=PP2, poison=True),
    ],
}  # fmt: skip
EVERYDAY = ("one", "epochs_2", "not_finite")
REST = ("with_critic", "tp2_sp", "vpp2", "cp2", "dp2_starved", "ep2")
NOT_FINITE = ("not_finite", "pp2_not_finite")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("distance")
    oracle.write_models(path / "models", only=("qwen3", "qwen3_moe"))
    return path


@pytest.fixture(scope="session")
def results(folder: Path) -> Results:
    return Results(folder, CASES, [EVERYDAY, REST])


def each(*, moves: bool) -> list[Any]:
    tiers = dict.fromkeys(EVERYDAY, pytest.mark.everyday) | dict.fromkeys(REST, pytest.mark.rest)
    return [
        pytest.param(one, id=one["name"], marks=tiers.get(one["name"], pytest.mark.full))
        for cases in CASES.values()
        for one in cases
        if (one["name"] not in NOT_FINITE) == moves
    ]


def measured_tokens(case: dict[str, Any]) -> Tensor:
    """Where the tokens stand on which the distance is measured."""
    batch = make_batch()
    counts = batch.num_trainable_each
    names = case["plan"]
    first = case.get("updates", [0])[0]
    stages = 2 if "virtual_pipeline" in case.get("parallel", {}) else 1
    chosen: list[int] = []
    for micros in PLANS[names if isinstance(names, str) else names[first]]:
        joined = [[*chain(*micros[k : k + stages])] for k in range(0, len(micros), stages)]
        chosen += max(joined, key=lambda rows: sum(counts[i] for i in rows))
    return ragged_index(batch.cu_seqlens, torch.tensor(chosen))


@pytest.mark.parametrize("case", each(moves=True))
def test_the_distance_of_a_step_is_that_of_its_weights(
    case: dict[str, Any], results: Results, folder: Path
) -> None:
    got = results[case["name"]]
    model = folder / "models" / case["model"]
    before, after = oracle.logprobs_around(model, got["moved"])
    expected = 0.5 * (after - before)[measured_tokens(case)].square().mean().item()
    assert expected > 1e-5
    assert got["distance"] == {"policy/step_kl": pytest.approx(expected, rel=1e-3)}


@pytest.mark.parametrize("case", each(moves=False))
def test_a_step_that_changes_no_weight_has_no_distance(
    case: dict[str, Any], results: Results
) -> None:
    got = results[case["name"]]
    assert got["unchanged"]["policy"]
    assert got["distance"] == {"policy/step_kl": 0.0}
