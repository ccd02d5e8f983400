"""The arithmetic of splits: the slices of all ranks make the whole, pack and unpack are inverse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from backends.megatron.convert.architecture import Architecture, hf_shapes, model_entries
from backends.megatron.convert.folder import FolderWriter
from backends.megatron.convert.layout import Slice, global_name, pack, tp_slice, unpack
from backends.megatron.convert.load import SafetensorsFolder
from backends.megatron.convert.read import read_architecture
from backends.megatron.convert.table import OUTPUT_LAYER, VALUE_HEAD, Split
from rlcore.errors import ModelError
from rlcore.weights import TensorSpec

HEAD_DIM = 4
CONFIG: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": HEAD_DIM, "max_position_embeddings": 16, "vocab_size": 31,
}  # fmt: skip


@pytest.fixture
def arch(tmp_path: Path) -> Architecture:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").touch()
    return read_architecture(tmp_path)


def test_megatron_interleaves_qkv_by_group() -> None:
    """Two groups of two query heads: q0 q1 k0 v0, q2 q3 k1 v1."""
    query, key, value = (
        torch.arange(n * HEAD_DIM) + base for n, base in ((4, 0), (2, 100), (2, 200))
    )
    out = torch.empty(8 * HEAD_DIM, dtype=torch.int64)
    pack(Split.QKV, [query, key, value], HEAD_DIM, out)
    heads = out.view(8, HEAD_DIM)[:, 0].tolist()
    assert heads == [0, 4, 100, 200, 8, 12, 104, 204]


def test_gate_above_up() -> None:
    out = torch.empty(4, 2)
    pack(Split.GATED, [torch.zeros(2, 2), torch.ones(2, 2)], HEAD_DIM, out)
    assert out[:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("size", "padded"), [(1, 31), (2, 32), (2, 128)])
def test_every_entry_survives_every_split(arch: Architecture, size: int, padded: int) -> None:
    for entry in model_entries(arch, "lm"):
        full = [torch.randn(shape) for shape in hf_shapes(arch, entry)]
        rebuilt = [torch.full_like(tensor, torch.nan) for tensor in full]
        for rank in range(size):
            parts = [tp_slice(entry.split, tuple(t.shape), rank, size, padded) for t in full]
            pieces = [part.of(tensor) for part, tensor in zip(parts, full)]
            rows = (
                padded // size
                if entry.split is Split.VOCAB
                else sum(len(piece) for piece in pieces)
            )
            param = torch.full((rows, *pieces[0].shape[1:]), torch.nan)
            pack(entry.split, pieces, HEAD_DIM, param)
            assert not param.isnan().any()
            assert entry.split is not Split.VOCAB or not param[len(pieces[0]) :].any()
            views = unpack(entry.split, param, HEAD_DIM, [len(piece) for piece in pieces])
            for part, tensor, view in zip(parts, rebuilt, views):
                part.of(tensor).copy_(view.reshape(part.shape(tuple(tensor.shape))))
        for before, after in zip(full, rebuilt):
            assert torch.equal(before, after), entry.megatron


def test_a_rank_of_padding_alone() -> None:
    assert tp_slice(Split.VOCAB, (31, 8), rank=1, size=2, padded_vocab=128) == Slice(0, 31, 0)


@pytest.mark.parametrize("split", [Split.COLUMN, Split.ROW, Split.GATED, Split.QKV])
def test_an_unsplit_matrix_is_no_slice(split: Split) -> None:
    """Rank 0 of a publication receives a whole tensor into the bucket, and columns beside it."""
    assert tp_slice(split, (24, 8), rank=0, size=1, padded_vocab=0) == Slice(None)


def test_heads(arch: Architecture) -> None:
    lm, value = (
        {entry.megatron for entry in model_entries(arch, head)} for head in ("lm", "value")
    )
    assert lm - value == {OUTPUT_LAYER}
    assert value - lm == {VALUE_HEAD}


def test_names_count_layers_over_the_whole_model_and_know_fused_norms() -> None:
    """Transformer Engine's spec keeps the norm inside the linear layer behind it."""
    layer = nn.Module()
    layer.layer_number = 6  # type: ignore[assignment]  # Megatron counts from 1
    model = nn.Module()
    model.decoder = nn.Module()
    model.decoder.layers = nn.ModuleList([layer])
    assert (
        global_name(model, "decoder.layers.0.mlp.linear_fc2.weight")
        == "decoder.layers.5.mlp.linear_fc2.weight"
    )
    fused = "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"
    assert global_name(model, fused) == "decoder.layers.5.input_layernorm.weight"
    assert global_name(model, "decoder.final_layernorm.weight") == "decoder.final_layernorm.weight"


def test_unreadable_weights_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4, 2)}, tmp_path / "model-1.safetensors")
    index = {
        "weight_map": {
            "a": "model-1.safetensors",
            "b": "model-2.safetensors",
            "c": "model-3.safetensors",
        }
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model-3.safetensors").write_bytes(b"\1" * 100)
    whole = Slice(None)
    with SafetensorsFolder(tmp_path) as source:
        assert source.read("a", (4, 2), Slice(0, 1, 2)).shape == (2, 2)
        with pytest.raises(ModelError, match="no tensor 'd'"):
            source.read("d", (1,), whole)
        with pytest.raises(
            ModelError, match=r"'a' has shape \(4, 2\), config\.json makes it \(4, 3\)"
        ):
            source.read("a", (4, 3), whole)
        with pytest.raises(ModelError, match=r"shard model-2\.safetensors is missing"):
            source.read("b", (1,), whole)
        with pytest.raises(
            ModelError, match=r"model-3\.safetensors: not a readable safetensors file"
        ):
            source.read("c", (1,), whole)


def test_a_folder_is_replaced_only_by_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill while the old one is deleted leaves the new one in its place."""
    deleted: list[Path] = []
    rmtree = shutil.rmtree

    def noted(path: Path, **options: Any) -> None:
        deleted.append(Path(path))
        rmtree(path, **options)

    monkeypatch.setattr(shutil, "rmtree", noted)
    source = tmp_path / "source"
    target = tmp_path / "target"
    source.mkdir()
    specs = [TensorSpec("a", (2,), "float32")]
    for value in (1.0, 2.0):
        writer = FolderWriter(target, specs, 1 << 20, (source,))
        writer.add("a", torch.full((2,), value))
        if value == 2.0:
            with SafetensorsFolder(target) as before:
                assert before.read("a", (2,), Slice(None)).tolist() == [1.0, 1.0]
        writer.complete()
        writer.finish({"model_type": "llama"}, "LlamaForCausalLM")
    with SafetensorsFolder(target) as after:
        assert after.read("a", (2,), Slice(None)).tolist() == [2.0, 2.0]
    assert target not in deleted
    assert json.loads((target / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(ModelError, match="read from"):
        FolderWriter(target, specs, 1 << 20, (target,))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    with pytest.raises(ModelError, match="is no Hugging Face folder"):
        FolderWriter(tmp_path / "notes", specs, 1 << 20, (source,))
