"""Checkpoints saved under one layout and loaded under others: weights and the next step equal to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import write_model
from safetensors.torch import load_file
from worlds import run_world

RANKS = Path(__file__).with_name("checkpoint_ranks.py")

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {"policy": "qwen2", "dtype": "fp32", "distributed": False},
    "fp32_distributed": {"policy": "qwen2_tied", "dtype": "fp32", "distributed": True},
    "bf16": {"policy": "llama_tied", "dtype": "bf16", "distributed": False},
    "bf16_distributed": {"policy": "qwen3_tied", "dtype": "bf16", "distributed": True},
    # The policy is saved before its first step.
    "critic_warmup": {"policy": "qwen3", "dtype": "fp32", "distributed": False, "critic_warmup": True},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "dp2": (2, {}),
    "tp2pp2": (4, {"tensor": 2, "pipeline": 2}),
}
# Saved by one rank and loaded by all; saved by all of two ranks and loaded by one.
PAIRS = [("one", target) for target in LAYOUTS] + [(source, "one") for source in ("tp2", "vpp2", "dp2")]


@dataclass(frozen=True)
class Results:
    root: Path

    def weights(self, stage: str, variant: str, source: str, target: str = "") -> dict[str, torch.Tensor]:
        """`stage`: "saved" (after two steps) or "next" (after the third)."""
        folder = self.root / stage / f"{variant}-{source}-{target}"
        return {
            f"{model}/{name}": tensor
            for model in ("policy", "critic")
            for path in (folder / model).glob("*.safetensors")
            for name, tensor in load_file(path).items()
        }


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    root = tmp_path_factory.mktemp("checkpoints")
    names = {"reward", *(variant["policy"] for variant in VARIANTS.values())}
    folders = {name: str(write_model(name, root / "hf" / name)) for name in sorted(names)}

    def job(variant: str, source: str, target: str = "") -> dict[str, Any]:
        name = f"{variant}-{source}-{target}"
        return {
            "variant": VARIANTS[variant],
            "sources": {"policy": folders[VARIANTS[variant]["policy"]], "critic": folders["reward"]},
            "load" if target else "save": str(root / "ckpt" / f"{variant}-{source}"),
            "before": str(root / "saved" / name),
            "after": str(root / "next" / name),
        }

    def world(kind: str, size: int, layouts: list[str]) -> None:
        plan = []
        for layout in layouts:
            pairs = [(layout, "")] if kind == "save" else [pair for pair in PAIRS if pair[1] == layout]
            jobs = [job(variant, *pair) for variant in VARIANTS for pair in pairs]
            plan.append({"layout": LAYOUTS[layout][1], "jobs": jobs})
        run_world(RANKS, size, root / f"{kind}{size}", plan)

    world("save", 1, ["one"])
    world("save", 2, ["tp2", "vpp2", "dp2"])
    world("load", 1, ["one"])
    world("load", 2, ["tp2", "pp2", "vpp2", "dp2"])
    world("load", 4, ["tp2pp2"])
    return Results(root)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_load_and_next_step_are_bit_equal(results: Results, variant: str, source: str, target: str) -> None:
    for stage in ("saved", "next"):
        expected = results.weights(stage, variant, source)
        got = results.weights(stage, variant, source, target)
        assert got.keys() == expected.keys()
        assert "critic/score.weight" in got
        for name, tensor in expected.items():
            assert torch.equal(got[name], tensor), f"{stage}: {name}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_step_changes_every_weight(results: Results, variant: str) -> None:
    """Else the equalities above would show nothing."""
    before, after = results.weights("saved", variant, "one"), results.weights("next", variant, "one")
    assert before
    for name, tensor in before.items():
        assert not torch.equal(after[name], tensor), name
