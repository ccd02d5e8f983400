"""A family of `model.bridge` from Hugging Face to Megatron and back, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gloo_world import run_world
from hf_folders import write_model
from plan import LAYOUTS
from world_outputs import read_weights

NAMES = ("tp2_sequence", "pp2", "ep2_etp1")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`source`, and what each layout made of it."""
    root = tmp_path_factory.mktemp("bridge")
    write_model("glm4_moe", root / "source")
    case = {"source": str(root / "source"), "bridge": "mbridge", "head": "lm", "dtype": "bf16",
        "divisible_by": 1,
            "bucket_bytes": 1 << 20, "alone_bytes": 300, "shard_bytes": 1 << 20}  # fmt: skip
    plan = [
        {"layout": LAYOUTS[name], "cases": [("convert", {**case, "target": str(root / name)})]}
        for name in NAMES
    ]
    run_world(Path(__file__).with_name("world_ranks.py"), 2, root / "world", plan)
    return root


@pytest.mark.parametrize("layout", NAMES)
def test_round_trip_is_bit_equal(layout: str, root: Path) -> None:
    before, after = (
        {name.split("/")[-1]: t for name, t in read_weights(root / f).items()}
        for f in ("source", layout)
    )
    assert after.keys() == before.keys()
    assert len(before) > 100
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name


def test_transformers_loads_the_export(root: Path) -> None:
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        root / NAMES[0], output_loading_info=True
    )
    assert type(model).__name__ == "Glm4MoeForCausalLM"
    assert not any(info[keys] for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"))
