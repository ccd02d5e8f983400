"""Safetensors shards that are written as their tensors come, read back by the library itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save

from rlcore.hf_folder import INDEX, ShardWriter, copy_companions, header
from rlcore.weights import Bucket, TensorSpec, cut_buckets, raw_bytes

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float64"])


def random_tensor(spec: TensorSpec) -> torch.Tensor:
    return torch.randn(spec.shape).to(spec.torch_dtype)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(SHAPES, DTYPES), min_size=1, max_size=6), st.integers(1, 200))
def test_the_library_reads_what_was_written(tmp_path_factory, kinds, shard_bytes) -> None:
    folder = tmp_path_factory.mktemp("hf")
    specs = [TensorSpec(f"layer.{i}", shape, dtype) for i, (shape, dtype) in enumerate(kinds)]
    tensors = {spec.name: random_tensor(spec) for spec in specs}
    shards = cut_buckets(specs, shard_bytes)
    writer = ShardWriter(folder, shards)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    read = {}
    for shard in shards:
        path = folder / writer.file_name(shard.index)
        read |= load_file(path)
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
    if len(shards) > 1:
        index = json.loads((folder / INDEX).read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        assert set(index["weight_map"]) == set(tensors)
    else:
        assert not (folder / INDEX).exists()


def test_a_shard_is_what_the_library_writes() -> None:
    tensor = torch.randn(3, 5)
    spec = TensorSpec("a.weight", (3, 5), "float32")
    assert header(Bucket(0, (spec,))) + bytes(raw_bytes(tensor)) == save(
        {"a.weight": tensor}, {"format": "pt"}
    )


def test_tensors_come_in_the_order_of_the_shards(tmp_path: Path) -> None:
    specs = [TensorSpec("a", (2,), "float32"), TensorSpec("b", (2,), "float32")]
    writer = ShardWriter(tmp_path, cut_buckets(specs, 8))
    with pytest.raises(ValueError, match=r"got b \(2,\) torch.float32, expected .*'a'"):
        writer.add("b", torch.zeros(2))
    with pytest.raises(ValueError, match=r"got a \(3,\)"):
        writer.add("a", torch.zeros(3))
    writer.add("a", torch.zeros(2))
    with pytest.raises(ValueError, match="before b was added"):
        writer.finish()


def test_a_transposed_tensor_is_written_in_row_major_order(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3).T
    writer = ShardWriter(tmp_path, cut_buckets([TensorSpec("a", (3, 2), "float32")], 100))
    writer.add("a", tensor)
    writer.finish()
    assert torch.equal(load_file(tmp_path / "model.safetensors")["a"], tensor)


def test_companions_are_the_tokenizers_and_how_to_generate(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tokenizer = tmp_path / "tokenizer"
    target = tmp_path / "target"
    for folder in (model, tokenizer, target):
        folder.mkdir()
    for path in (model / "generation_config.json", model / "vocab.json",
                 model / "model.safetensors", tokenizer / "config.json",
                 tokenizer / "tokenizer.json", tokenizer / "chat.jinja",
                 tokenizer / "tokenization_own.py"):  # fmt: skip
        path.write_text("{}")
    copy_companions(target, model, tokenizer)
    # no code: a reader of the export may run it
    copied = ["chat.jinja", "generation_config.json", "tokenizer.json"]
    assert sorted(path.name for path in target.iterdir()) == copied


def test_named_templates_come_along_and_the_models_way_to_generate_counts(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tokenizer = tmp_path / "tokenizer"
    named = Path("additional_chat_templates") / "tool_use.jinja"
    (tokenizer / named).parent.mkdir(parents=True)
    (tokenizer / named).write_text("with tools")
    (tokenizer / "generation_config.json").write_text("of the tokenizer's model")
    model.mkdir()
    alone = tmp_path / "alone"
    alone.mkdir()
    copy_companions(alone, model, tokenizer)
    assert (alone / named).read_text() == "with tools"
    assert (alone / "generation_config.json").read_text() == "of the tokenizer's model"
    (model / "generation_config.json").write_text("of the model")
    both = tmp_path / "both"
    both.mkdir()
    copy_companions(both, model, tokenizer)
    assert (both / "generation_config.json").read_text() == "of the model"
