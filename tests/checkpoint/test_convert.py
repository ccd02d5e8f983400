"""Hugging Face -> Megatron -> Hugging Face, bit for bit, under every layout, over gloo ranks."""

from __future__ import annotations

import json

import pytest
import torch
from hf_folders import MODELS, auto_class
from plan import LAYOUTS as LAYOUTS_BY_NAME
from plan import WORLDS
from world_outputs import Outputs, read_weights

LAYOUTS = [layout for world in WORLDS.values() for layout in world.layouts]


# Biases of experts are added once; a norm over all heads has whole heads, of which there are two.
MOST_TENSOR = {"gpt_oss": 1, "minimax_m2": 2, "olmo3": 2, "gemma4": 2}
# a third in every run of the tests: every layout has models of each kind, every model some layouts
CASES = [
    pytest.param(layout, name, marks=() if (i + j) % 3 == 0 else pytest.mark.full)
    for i, layout in enumerate(LAYOUTS)
    for j, name in enumerate(MODELS)
    if LAYOUTS_BY_NAME[layout].get("tensor", 1) <= MOST_TENSOR.get(name, 4)
]


@pytest.mark.parametrize(("layout", "name"), CASES)
def test_round_trip_is_bit_equal(layout: str, name: str, converted: Outputs) -> None:
    before = read_weights(converted.model(name))
    after = read_weights(converted.export(layout, name))
    assert before
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], tensor), key


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_the_export(name: str, converted: Outputs) -> None:
    auto = auto_class(name)
    layout = "one" if name == "gpt_oss" else "tp2"
    model, info = auto.from_pretrained(converted.export(layout, name), output_loading_info=True)
    assert not info["missing_keys"]
    # transformers knows the layers that predict further tokens by the numbers of released models.
    assert not {key for key in info["unexpected_keys"] if not key.startswith("model.layers.4.")}
    assert not info["mismatched_keys"]
    original = auto.from_pretrained(converted.model(name))
    for (key, a), b in zip(model.state_dict().items(), original.state_dict().values()):
        # transformers keeps this one in fp32, but for MiniMax-M2.
        wide = key.endswith("e_score_correction_bias") and name != "minimax_m2"
        assert a.dtype == b.dtype == (torch.float32 if wide else MODELS[name][2])
        assert torch.equal(a, b), key
    tokens = torch.tensor([[1, 5, 30, 2]])
    assert torch.equal(model(tokens).logits, original(tokens).logits)


def test_shards_index_and_companions(converted: Outputs) -> None:
    folder = converted.export("one", "qwen2")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(shards) > 2
    assert sorted(set(index["weight_map"].values())) == shards
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in read_weights(folder).values()
    )
    assert (folder / "tokenizer.json").exists()
    assert (folder / "chat_template.jinja").exists()
    assert (folder / "generation_config.json").exists()
    assert not list(folder.parent.glob(".*partial"))
    single = converted.export("one", "qwen3")
    assert [path.name for path in single.glob("*.safetensors*")] == ["model.safetensors"]
