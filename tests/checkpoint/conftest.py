"""The gloo worlds of this folder, one a size: each runs the cases that a file's tests ask for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import MODELS, write_model
from plan import LAYOUTS, LOADS, OTHER_KIND, REFUSED, VARIANTS, WORLDS, Refused
from world_outputs import Outputs

from tests.parity.spawn import run_ranks

# Exports that transformers reads, and whose files are looked at.
LOOKED_AT = {
    "tp2": tuple(name for name in MODELS if name != "gpt_oss"),
    "one": ("qwen2", "qwen3", "gpt_oss"),
}


def _convert_cases(
    outputs: Outputs, layout: str, names: Collection[str]
) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("convert", {
            "source": str(outputs.model(name)),
            "target": str(outputs.export(layout, name)),
            "dtype": "bf16" if MODELS[name][2] == torch.bfloat16 else "fp32",
            "head": "value" if name == "reward" else "lm",
            # at TP 2 one rank holds padding alone
            "divisible_by": 64 if name == "qwen3" else 1,
            "bucket_bytes": 3000 if name == "llama" else 1 << 20,
            # some parts of a bucket go by themselves
            "alone_bytes": 1 << 20 if name in ("llama", "qwen3") else 300,
            "shard_bytes": 20_000 if name in ("llama", "qwen2") else 1 << 20,
        })
        for name in names
    ]  # fmt: skip


def _checkpoint_case(
    outputs: Outputs, variant: str, source: str, target: str = ""
) -> tuple[str, dict[str, Any]]:
    models = _models(outputs, variant)
    if target.startswith(OTHER_KIND):
        models["variant"] = {
            **models["variant"],
            "distributed": not models["variant"]["distributed"],
        }
    return "checkpoint", {
        **models,
        "load" if target else "save": str(outputs.checkpoint(variant, source)),
        "before": str(outputs.trained("before", variant, source, target)),
        "after": str(outputs.trained("after", variant, source, target)),
    }


def _refused_case(outputs: Outputs, name: str, case: Refused) -> tuple[str, dict[str, Any]]:
    models = _models(outputs, case.into)
    if case.models:
        models["sources"] = {role: str(outputs.model(model)) for role, model in case.models.items()}
    folder = outputs.refused(name)
    return "refused", {
        **models,
        "load": str(outputs.checkpoint(case.saved, "one")),
        "copy": str(folder / "checkpoint"),
        "damage": case.damage,
        "result": str(folder / "result"),
        **(
            {"weights_of": case.weights_of, "export": str(folder / "export")}
            if case.weights_of
            else {}
        ),
    }


def _models(outputs: Outputs, variant: str) -> dict[str, Any]:
    policy = str(outputs.model(VARIANTS[variant]["policy"]))
    return {
        "variant": VARIANTS[variant],
        "sources": {"policy": policy, "critic": str(outputs.model("reward"))},
    }


def _asked_for(request: pytest.FixtureRequest, *names: str) -> set[tuple[Any, ...]]:
    """The parameters of these names of every test of the file that is run."""
    return {
        tuple(item.callspec.params.get(name) for name in names)
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and hasattr(item, "callspec")
    }


def _run_plan(outputs: Outputs, size: int, plan: Sequence[tuple[str, list[Any]]]) -> None:
    payload = [{"layout": LAYOUTS[layout], "cases": cases} for layout, cases in plan]
    run_ranks(
        Path(__file__).with_name("world_ranks.py"),
        size,
        outputs.root / f"world{size}",
        payload,
        deadline_s=240,
    )


@pytest.fixture(scope="module")
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """Every model, loaded and exported under the layouts that a test asks for."""
    asked = _asked_for(request, "layout", "name")
    outputs = Outputs(tmp_path_factory.mktemp("converted"))
    for name in MODELS:
        write_model(name, outputs.model(name))
    for size, world in WORLDS.items():
        plan = []
        for layout in world.layouts:
            names = [
                name
                for name in MODELS
                if (layout, name) in asked or name in LOOKED_AT.get(layout, ())
            ]
            plan.append((layout, _convert_cases(outputs, layout, names)))
        _run_plan(outputs, size, plan)
    return outputs


@pytest.fixture(scope="module")
def outputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    """Checkpoints of every variant, loaded under the layouts that a test asks for."""
    asked = _asked_for(request, "variant", "source", "target")
    outputs = Outputs(tmp_path_factory.mktemp("worlds"))
    for name in {"reward", "qwen2", *(variant["policy"] for variant in VARIANTS.values())}:
        write_model(name, outputs.model(name))
    for size, world in WORLDS.items():
        plan = [
            (layout, [_checkpoint_case(outputs, variant, layout) for variant in VARIANTS])
            for layout in world.saves
        ]
        for layout in world.layouts:
            loads = [load for load in LOADS if load in asked]
            ours = [load for load in loads if load[2].removeprefix(OTHER_KIND) == layout]
            plan.append((layout, [_checkpoint_case(outputs, *load) for load in ours]))
        for name, case in REFUSED.items():
            if case.layout in world.layouts:
                plan.append((case.layout, [_refused_case(outputs, name, case)]))
        _run_plan(outputs, size, plan)
    return outputs
