"""Hugging Face -> Megatron -> Hugging Face, bit for bit, under every layout; real gloo ranks, one launch a world size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_folders import MODELS, write_model
from safetensors.torch import load_file
from worlds import run_world

RANKS = Path(__file__).with_name("convert_ranks.py")
WORLDS: dict[int, list[dict[str, Any]]] = {
    1: [{}],
    2: [{"tensor": 2}, {"pipeline": 2}, {"pipeline": 2, "virtual_pipeline": 2}, {"tensor": 2, "sequence": True}],
    4: [{"tensor": 2, "pipeline": 2}, {"tensor": 2}],       # the second has two data-parallel replicas
}
CASES = [(size, layout, name) for size, layouts in WORLDS.items() for layout in layouts for name in MODELS]


def case_name(layout: dict[str, Any], model: str) -> str:
    return "-".join([model, *(f"{key}{value}" for key, value in layout.items())])


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: write_model(name, root / name) for name in MODELS}


@pytest.fixture(scope="session")
def exports(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """world size -> folder of its exports, `case_name` each."""
    folders = {}
    for size, layouts in WORLDS.items():
        folders[size] = tmp_path_factory.mktemp(f"world{size}")
        payload = [
            {
                "layout": layout,
                "cases": [
                    {
                        "name": case_name(layout, name),
                        "source": str(folder),
                        "dtype": "bf16" if MODELS[name][2] == torch.bfloat16 else "fp32",
                        "head": "value" if name == "reward" else "lm",
                        "divisible_by": 64 if name == "qwen3" else 1,       # at TP 2 one rank holds padding alone
                        "bucket_bytes": 3000 if name == "llama" else 1 << 20,
                        "shard_bytes": 20_000 if name in ("llama", "qwen2") else 1 << 20,
                    }
                    for name, folder in models.items()
                ],
            }
            for layout in layouts
        ]
        run_world(RANKS, size, folders[size], payload)
    return folders


@pytest.mark.parametrize(("size", "layout", "name"), CASES, ids=lambda v: str(v))
def test_round_trip_is_bit_equal(
    size: int, layout: dict[str, Any], name: str, models: dict[str, Path], exports: dict[int, Path]
) -> None:
    before = read_weights(models[name])
    after = read_weights(exports[size] / case_name(layout, name))
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], tensor), key


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_the_export(name: str, models: dict[str, Path], exports: dict[int, Path]) -> None:
    import transformers

    auto = transformers.AutoModelForSequenceClassification if name == "reward" else transformers.AutoModelForCausalLM
    folder = exports[2] / case_name({"tensor": 2}, name)
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    original = auto.from_pretrained(models[name])
    for (key, a), b in zip(model.state_dict().items(), original.state_dict().values()):
        assert a.dtype == b.dtype == MODELS[name][2]
        assert torch.equal(a, b), key
    tokens = torch.tensor([[1, 5, 30, 2]])
    assert torch.equal(model(tokens).logits, original(tokens).logits)


def test_shards_index_and_companions(exports: dict[int, Path]) -> None:
    folder = exports[1] / "qwen2"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_weights(folder).values())
    assert (folder / "tokenizer.json").exists()
    assert (folder / "chat_template.jinja").exists()
    assert not list(folder.parent.glob(".*partial"))
    single = exports[1] / "qwen3"
    assert [path.name for path in single.glob("*.safetensors*")] == ["model.safetensors"]
