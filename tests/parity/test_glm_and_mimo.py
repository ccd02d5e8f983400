"""GLM-4.5 and MiMo, which transformers lacks: log-probs and gradients against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from spawn import run_ranks
from torch import Tensor

RANKS = Path(__file__).with_name("parity_ranks.py")
TIGHT = 1e-5  # relative, over each whole tensor
SP2 = {"tensor": 2, "sequence": True}


def case(name: str, model: str, plan: str = "uneven", **keys: Any) -> dict[str, Any]:
    return {"name": name, "model": model, "plan": plan, **keys}


CASES: dict[int, list[dict[str, Any]]] = {
    1: [case("mimo", "mimo", "one", critic=True), case("glm4_moe", "glm4_moe", "one")],
    2: [
        case("mimo_tp2", "mimo", parallel={"tensor": 2}),
        case("mimo_pp2", "mimo", parallel={"pipeline": 2}),
        case("glm4_moe_tp2_ep2", "glm4_moe", parallel={**SP2, "expert": 2, "expert_tensor": 1}),
        case("glm4_moe_tp2", "glm4_moe", parallel=SP2),
    ],
}
NAMES = [one["name"] for cases in CASES.values() for one in cases]


def write_mimo(folder: Path, source: Path) -> None:
    """Qwen2's weights under the name of MiMo, which is Qwen2 with layers that are left out."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config |= {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "num_nextn_predict_layers": 1,
    }
    config |= {"attention_bias": True}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    predicted = {"model.mtp_layers.0.input_proj.weight": torch.zeros(2, 2)}
    save_file({**tensors, **predicted}, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity_glm")
    oracle.write_models(path / "models", only=("qwen2_tied", "glm4_moe"))
    write_mimo(path / "models" / "mimo", path / "models" / "qwen2_tied")
    for size, cases in CASES.items():
        run_ranks(RANKS, size, path / str(size), cases, deadline_s=120)
    return path


def result(folder: Path, name: str) -> tuple[dict[str, Any], Path]:
    """The result of a case, and the folder that transformers reads for it."""
    size, one = next(
        (size, one) for size, cases in CASES.items() for one in cases if one["name"] == name
    )
    read: dict[str, Any] = torch.load(folder / str(size) / f"{name}.pt", weights_only=False)
    return read, folder / "models" / {"mimo": "qwen2_tied"}.get(one["model"], one["model"])


def distances(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == expected.keys()
    return {
        name: d
        for name, want in expected.items()
        if not (d := float((got[name].double() - want.double()).norm() / want.double().norm()))
        <= TIGHT
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_family_equals_transformers(name: str, folder: Path) -> None:
    got, model = result(folder, name)
    expected = oracle.policy_step(model)
    torch.testing.assert_close(
        got["scores"]["logprobs"].double(), expected["logprobs"], rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        got["scores"]["entropy"].double(), expected["entropy"], rtol=1e-5, atol=1e-5
    )
    gradients = got["gradients"]["policy"]
    for bias in [name for name in gradients if name.endswith("e_score_correction_bias")]:
        assert not gradients.pop(bias).any()  # it comes with the weights and stays as it is
    assert not distances(gradients, expected["gradients"])
