"""With top-k and top-p the trainer trains the truncated distribution, on every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from cases import PLANS
from sample_oracle import step_on_samples
from sampling_mask_samples import draw_samples
from spawn import run_ranks

from rlcore.data.batch import RolloutBatch
from rlcore.data.sample import Sample
from rlcore.runs.rollouts import write_rollouts

RANKS = Path(__file__).with_name("parity_ranks.py")
HALVES: dict[str, Any] = {
    "model": "qwen3",
    "plan": ["half0", "half1"],
    "update": 1,
    "samples": "kept.parquet",
}

CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"name": "off", **HALVES, "samples": "plain.parquet"},
        {"name": "on", **HALVES, "chunk_elements": 40},
        {"name": "uneven", **HALVES, "plan": "uneven", "update": 0},
        {"name": "on_policy", **HALVES, "plan": "uneven", "update": 0,
         "algorithm": {"old_logprobs": "rollout"}},
        {"name": "off_policy", **HALVES, "plan": "uneven", "update": 0,
         "algorithm": {"old_logprobs": "rollout"},
         "samples": "plain.parquet"},
    ],
    2: [
        {"name": "tp2", **HALVES, "parallel": {"tensor": 2, "sequence": True},
         "chunk_elements": 40},
        # the second rank has no token of the vocabulary
        {"name": "tp2_padded", **HALVES, "parallel": {"tensor": 2}, "divisible_by": 64},
        {"name": "pp2", **HALVES, "parallel": {"pipeline": 2}},
        {"name": "cp2", **HALVES, "parallel": {"context": 2}},
        {"name": "dp2", **HALVES, "plan": "starved", "update": 0},
    ],
}  # fmt: skip
KEPT = [
    case
    for cases in CASES.values()
    for case in cases
    if case["samples"] == "kept.parquet" and "algorithm" not in case
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("keep_sets")
    oracle.write_models(base / "models", only=("qwen3",))
    return base


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Sample]:
    """Samples of a run, and the same without their masks."""
    torch.set_num_threads(1)
    drawn = draw_samples(
        folder / "models" / "qwen3", oracle._load(folder / "models" / "qwen3").float()
    )
    write_rollouts(folder / "kept.parquet", 1, drawn)
    kept = [sample.sampling_mask for sample in drawn]
    for sample in drawn:
        sample.sampling_mask = None
    write_rollouts(folder / "plain.parquet", 1, drawn)
    for sample, sets in zip(drawn, kept):
        sample.sampling_mask = sets
    return drawn


@pytest.fixture(scope="module")
def results(folder: Path, samples: list[Sample]) -> dict[str, dict[str, Any]]:
    for size, cases in CASES.items():
        run_ranks(RANKS, size, folder / f"world{size}", cases, deadline_s=120)
    return {case["name"]: torch.load(folder / f"world{size}" / f"{case['name']}.pt",
        weights_only=False)
            for size, cases in CASES.items() for case in cases}  # fmt: skip


def sequences_of(case: dict[str, Any]) -> list[int]:
    """The samples of the optimizer step whose gradients are compared."""
    plan = case["plan"] if isinstance(case["plan"], str) else case["plan"][case["update"]]
    return [i for rank in PLANS[plan] for micro in rank for i in micro]


def test_the_samples_are_what_they_are_for(samples: list[Sample]) -> None:
    batch = RolloutBatch.from_samples(samples)
    assert batch.sampling_mask is not None
    counts = batch.sampling_mask.offsets.diff()
    assert {0, 1} <= set(counts.tolist())
    assert counts.max() > 4
    assert batch.num_trainable_each.count(0) == 2
    assert sum(sample.turns == 2 for sample in samples) == 2


@pytest.mark.parametrize("case", KEPT, ids=lambda case: str(case["name"]))
def test_engine_and_trainer_agree_and_gradients_are_those_of_the_truncated_distribution(
    case: dict[str, Any], results: dict[str, dict[str, Any]], folder: Path, samples: list[Sample]
) -> None:
    result = results[case["name"]]
    model = oracle._load(folder / "models" / "qwen3")
    wanted = step_on_samples(model, samples, sequences_of(case))
    engine = RolloutBatch.from_samples(samples).vectors["rollout_logprobs"]
    torch.testing.assert_close(result["scores"]["logprobs"], engine, atol=1e-5, rtol=0)
    torch.testing.assert_close(result["reference"]["logprobs"], engine, atol=1e-5, rtol=0)
    torch.testing.assert_close(
        result["scores"]["logprobs"].double(), wanted["logprobs"], atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        result["scores"]["entropy"].double(), wanted["entropy"], atol=1e-5, rtol=0
    )
    got = result["gradients"]["policy"]
    assert set(got) == set(wanted["gradients"])
    assert not oracle.far(got, wanted["gradients"])


def test_without_the_sets_engine_and_trainer_differ(
    results: dict[str, dict[str, Any]], samples: list[Sample]
) -> None:
    engine = RolloutBatch.from_samples(samples).vectors["rollout_logprobs"]
    gap = (results["off"]["scores"]["logprobs"] - engine).abs()
    assert gap.mean() > 0.1
    off, on = (results[name]["gradients"]["policy"]["lm_head.weight"] for name in ("off", "on"))
    assert oracle.relative(off, on) > 0.01


def test_a_step_on_policy_has_a_ratio_of_one(results: dict[str, dict[str, Any]]) -> None:
    on = results["on_policy"]["metrics"]
    off = results["off_policy"]["metrics"]
    assert on["val/ratio"] == pytest.approx(1.0, abs=1e-5)
    assert abs(on["policy/approxkl_avg"]) < 1e-8
    assert abs(off["val/ratio"] - 1.0) > 0.01
    assert off["policy/approxkl_avg"] > 1e-3
