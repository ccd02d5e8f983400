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
    "fp32": {"dtype": "fp32", "distributed": False},
    "fp32_distributed": {"dtype": "fp32", "distributed": True},
    "bf16": {"dtype": "bf16", "distributed": False},
    "bf16_distributed": {"dtype": "bf16", "distributed": True},
    "critic_warmup": {"dtype": "fp32", "distributed": False, "critic_warmup": True},    # the policy is saved unstepped
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
    sources = {
        name: {
            "policy": str(write_model(model, root / "hf" / name / "policy")),
            "critic": str(write_model("reward", root / "hf" / name / "critic")),
        }
        for name, model in (("fp32", "qwen3_tied"), ("bf16", "qwen2"))
    }

    def jobs(kind: str, layout: str) -> list[dict[str, Any]]:
        made = []
        for name, variant in VARIANTS.items():
            common = {"variant": variant, "sources": sources[variant["dtype"]]}
            if kind == "save":
                made.append({**common, "steps": [0, 2], "save": str(root / "ckpt" / f"{name}-{layout}"),
                             "export": str(root / "saved" / f"{name}-{layout}-")})  # fmt: skip
                made.append({**common, "steps": [0, 3], "export": str(root / "next" / f"{name}-{layout}-")})
                continue
            for source, target in PAIRS:
                if target == layout:
                    loaded = {**common, "load": str(root / "ckpt" / f"{name}-{source}")}
                    made.append({**loaded, "steps": [0, 0], "export": str(root / "saved" / f"{name}-{source}-{target}")})
                    made.append({**loaded, "steps": [2, 3], "export": str(root / "next" / f"{name}-{source}-{target}")})
        return made

    def world(kind: str, size: int, layouts: list[str]) -> None:
        plan = [{"layout": LAYOUTS[layout][1], "jobs": jobs(kind, layout)} for layout in layouts]
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
