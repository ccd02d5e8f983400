"""Routing replay of the engine's experts, with sampling masks beside it, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from sample_oracle import step_on_samples
from sampling_mask_samples import draw_samples
from spawn import Results
from torch import Tensor

from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample
from rlcore.runs.rollouts import write_rollouts

RANKS = Path(__file__).with_name("routing_ranks.py")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
FORCED: dict[str, Any] = {"model": "qwen3_moe", "then": "qwen3_moe_other", "plans": ["pairs"],
    "replay": "engine",
                          "samples": "recorded.parquet"}  # fmt: skip

# By the ranks of a launch; those of several are launched by `scripts/test.sh --full` alone.
CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"name": "forced", **FORCED},
        {"name": "forced_recompute", **FORCED, "megatron": FULL},
        {"name": "own", **FORCED, "replay": "none"},
    ],
    2: [
        {"name": "ep2", **FORCED, "plans": ["dp2"], "parallel": {"expert": 2}},
        {
            "name": "vpp2",
            **FORCED,
            "parallel": {"pipeline": 2, "virtual_pipeline": 2},
            "megatron": FULL,
        },
        {"name": "tp2_sp", **FORCED, "parallel": {"tensor": 2, "sequence": True}},
        {"name": "cp2", **FORCED, "parallel": {"context": 2}},
    ],
}
NAMES = [pytest.param(case["name"], marks=pytest.mark.full if size > 1 else ())
         for size, cases in CASES.items()
         for case in cases if case["replay"] == "engine"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("engine_routing")
    oracle.write_models(base / "models", only=("qwen3_moe", "qwen3_moe_other"))
    return base


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    """Samples of a run; the middle of one and the end of another have no record."""
    torch.set_num_threads(1)
    drawn = draw_samples(folder / "models" / "qwen3_moe",
        oracle._load(folder / "models" / "qwen3_moe").float(),
                         routed_experts=True)  # fmt: skip
    for sample in drawn[:2]:
        assert sample.routed_experts is not None
        assert len(sample.routed_experts) == len(sample.tokens) - 1
    drawn[0].routed_experts[3:6] = -1  # type: ignore[index]
    drawn[1].routed_experts = drawn[1].routed_experts[:4]  # type: ignore[index]
    write_rollouts(folder / "recorded.parquet", 1, drawn)
    return drawn


@pytest.fixture(scope="module")
def results(folder: Path, samples: list[Sample]) -> Results:
    return Results(folder, CASES, (), script=RANKS)


@pytest.fixture(scope="module")
def expected(folder: Path, samples: list[Sample]) -> dict[str, Any]:
    """The second model's step in float64, with the recorded experts or else its own."""
    model = oracle._load(folder / "models" / "qwen3_moe_other")
    at_hand: list[Sample] = []
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    for index, router in enumerate(routers):

        def forced(
            router: Any, inputs: Any, output: Any, index: int = index
        ) -> tuple[Tensor, Tensor, Tensor]:
            record = at_hand[-1].routed_experts
            chosen = output[2].clone()
            if record is not None:
                given = torch.from_numpy(record[:, index]).long()
                chosen[: len(given)] = torch.where(given < 0, chosen[: len(given)], given)
            probabilities = output[0].softmax(-1).gather(1, chosen)
            return output[0], probabilities / probabilities.sum(-1, keepdim=True), chosen

        router.register_forward_hook(forced)
    return step_on_samples(model, samples, range(len(samples)), before=at_hand.append)


@pytest.mark.parametrize("name", NAMES)
def test_log_probs_and_gradients_are_those_of_the_engines_experts(
    name: str, results: Results, expected: dict[str, Any], samples: list[Sample]
) -> None:
    result = results[name]
    first, second = (score["logprobs"] for score in result["scores"])
    engine = RolloutBatch.from_samples(samples).vectors["rollout_logprobs"]
    torch.testing.assert_close(first, engine, atol=1e-5, rtol=0)
    torch.testing.assert_close(second.double(), expected["logprobs"], atol=1e-5, rtol=0)
    got = result["gradients"]
    assert set(got) == set(expected["gradients"])
    assert not oracle.far(got, expected["gradients"])
    changed = result["metrics"]["train/routing_replay_changed"]
    assert 0.2 < changed < 1
    assert changed == results["forced"]["metrics"]["train/routing_replay_changed"]


def test_routers_that_choose_for_themselves_give_others(
    results: Results, expected: dict[str, Any]
) -> None:
    result = results["own"]
    assert (result["scores"][1]["logprobs"].double() - expected["logprobs"]).abs().mean() > 1e-2
    assert "train/routing_replay_changed" not in result["metrics"]
