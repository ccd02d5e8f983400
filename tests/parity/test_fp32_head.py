"""An fp32 head in whole bf16 models: tied and not, with adapters, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import oracle
import pytest
from spawn import Results

RANKS = Path(__file__).with_name("head_ranks.py")
LORA = {"rank": 4, "targets": ["q_proj", "down_proj"]}


def case(name: str, model: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "dtype": "bf16", "fp32_head": True} | keys


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        case("own", "qwen3"),
        case("rounded", "qwen3", fp32_head=False),
        case("tied", "qwen3_tied", chunk_elements=100),
        case("lora", "qwen3", lora=LORA),
        case("fp32", "qwen3", dtype="fp32"),
        case("fp32_without", "qwen3", dtype="fp32", fp32_head=False),
    ],
    2: [
        case("tp2", "qwen3", parallel={"tensor": 2}),
        case("tp2_sp_tied", "qwen3_tied", parallel={"tensor": 2, "sequence": True}),
    ],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("fp32_head")
    oracle.write_models(folder / "models", only=("qwen3", "qwen3_tied"))
    return Results(folder, CASES, (), script=RANKS)


@pytest.mark.parametrize("name", ["own", "tied", "lora", "tp2", "tp2_sp_tied"])
def test_the_head_is_that_of_float64(name: str, results: Results) -> None:
    """Gradients are rounded to bf16 as they are returned; with TP 2 each rank returns its part."""
    errors = results[name]["errors"]
    assert len(errors) == (2 if name.startswith("tp2") else 1)
    for one in errors:
        assert ("d_weight" in one) is (name != "lora")
        assert one["logprobs"] < 2e-6
        assert one["entropy"] < 2e-6
        assert max(one["d_hidden"], one.get("d_weight", 0.0)) < 4e-3


def test_without_it_the_logits_are_rounded(results: Results) -> None:
    [errors] = results["rounded"]["errors"]
    assert errors["logprobs"] > 1e-3
    assert errors["entropy"] > 1e-4


def test_an_fp32_model_keeps_every_bit(results: Results) -> None:
    with_it = results["fp32"]["scores"]
    without = results["fp32_without"]["scores"]
    assert with_it.keys() == without.keys() == {"logprobs", "entropy"}
    assert all(with_it[name].equal(without[name]) for name in with_it)
