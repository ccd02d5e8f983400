"""The arithmetic of splits: the slices of all ranks make the whole, pack and unpack are inverse."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from backends.megatron.convert.adapters import adapted_layers, linear_entries
from backends.megatron.convert.architecture import Architecture, model_entries, tensor_shapes
from backends.megatron.convert.families import FAMILIES
from backends.megatron.convert.folder import FolderWriter
from backends.megatron.convert.layout import (
    Slice,
    global_name,
    pack,
    piece_of,
    tp_slice,
    unpack,
    weight_specs,
)
from backends.megatron.convert.load import SafetensorsFolder
from backends.megatron.convert.read import read_architecture
from backends.megatron.convert.table import OUTPUT_LAYER, VALUE_HEAD, Split
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import ConfigError, ModelError
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
    pack(Split.STACKED, [torch.zeros(2, 2), torch.ones(2, 2)], HEAD_DIM, out)
    assert out[:, 0].tolist() == [0, 0, 1, 1]


@pytest.fixture
def fused(arch: Architecture, monkeypatch: pytest.MonkeyPatch) -> Architecture:
    """Phi's tensors: q, k and v are the rows of one, and so are gate and up."""
    rows = []
    for entry in arch.table.entries:
        name = {Split.QKV: "qkv", Split.STACKED: "gate_up"}.get(entry.split)
        before: list[str] = []
        parts = []
        for part in entry.parts:
            module, _, kind = part.name.rpartition(".")
            whole = f"{module.rpartition('.')[0]}.{name}_proj.{kind}" if name else part.name
            parts.append(replace(part, name=whole, after=tuple(before)))
            before.append(part.shape[0])
        rows.append(replace(entry, parts=tuple(parts)))
    family = replace(arch.table, entries=tuple(rows), prefix=("model.", "model.language_model."))
    monkeypatch.setitem(FAMILIES, "fused", family)
    return replace(arch, family="fused")


def test_a_tensor_of_several_parts(fused: Architecture) -> None:
    shapes = {
        name: shape
        for entry in model_entries(fused, "lm")
        for name, shape in tensor_shapes(fused, entry).items()
    }
    layer = "model.language_model.layers.1."
    assert shapes[f"{layer}self_attn.qkv_proj.weight"] == (16 + 8 + 8, 8)
    assert shapes[f"{layer}self_attn.qkv_proj.bias"] == (16 + 8 + 8,)
    assert shapes[f"{layer}mlp.gate_up_proj.weight"] == (2 * 12, 8)
    assert shapes["lm_head.weight"] == (31, 8)
    assert {name.split(".")[-2] for entry in linear_entries(fused) for name in entry.names} == {
        "o_proj",
        "down_proj",
    }
    assert adapted_layers(fused, LoraConfig(rank=2, targets=["o_proj"]))
    for target in ("qkv_proj", "all-linear"):
        with pytest.raises(ConfigError, match=f"'{target}' targets .* several parts .* o_proj"):
            adapted_layers(fused, LoraConfig(rank=2, targets=[target]))


@pytest.fixture
def stacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Architecture:
    """gpt-oss' tensors: those of all experts in one, transposed, gate and up in turns."""
    sizes = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    config = {**CONFIG, "model_type": "qwen3_moe", **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(tmp_path, weights=False)
    rows = []
    for entry in arch.table.entries:
        parts = entry.parts
        if entry.per_expert:
            gated = len(parts) > 1
            name = "model.layers.{layer}.mlp.experts." + ("gate_up_proj" if gated else "down_proj")
            parts = tuple(
                replace(
                    part, name=name, step=len(parts), phase=phase, transposed=True, of_experts=True
                )
                for phase, part in enumerate(parts)
            )
        rows.append(replace(entry, parts=parts))
    monkeypatch.setitem(FAMILIES, "stacked", replace(arch.table, entries=tuple(rows)))
    return replace(arch, family="stacked")


def test_a_tensor_of_all_experts(stacked: Architecture) -> None:
    shapes = {spec.name: spec.shape for spec in weight_specs(stacked, torch.float32)}
    experts = {name: shape for name, shape in shapes.items() if ".experts." in name}
    assert len(experts) == 2 * 2
    assert experts["model.layers.1.mlp.experts.gate_up_proj"] == (3, 8, 12)
    assert experts["model.layers.1.mlp.experts.down_proj"] == (3, 6, 8)


@pytest.mark.parametrize("model", ["arch", "fused", "stacked"])
@pytest.mark.parametrize(("size", "padded"), [(1, 31), (2, 32), (2, 128)])
def test_every_entry_survives_every_split(
    request: pytest.FixtureRequest, model: str, size: int, padded: int
) -> None:
    arch: Architecture = request.getfixturevalue(model)
    specs = weight_specs(arch, torch.float32)
    full = {spec.name: torch.randn(spec.shape) for spec in specs}
    rebuilt = {name: torch.full_like(tensor, torch.nan) for name, tensor in full.items()}
    for entry in model_entries(arch, "lm"):
        for rank in range(size):
            places = [
                piece_of(entry, index, arch, rank, size, padded)
                for index in range(len(entry.parts))
            ]
            names = [part.name for part in entry.parts]
            pieces = [place.of(full[name]) for name, place in zip(names, places, strict=True)]
            assert [tuple(piece.shape) for piece in pieces] == [place.shape for place in places]
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
            for name, place, view in zip(names, places, views, strict=True):
                into = place.of(rebuilt[name])
                assert into.is_contiguous() or not place.contiguous
                into.copy_(view.reshape(place.shape))
    for name, before in full.items():
        assert torch.equal(before, rebuilt[name]), name


def test_pieces_are_read_as_slices_where_they_are_slices(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for model in ("arch", "fused", "stacked"):
        arch: Architecture = request.getfixturevalue(model)
        specs = weight_specs(arch, torch.float32)
        full = {spec.name: torch.randn(spec.shape) for spec in specs}
        save_file(full, tmp_path / "model.safetensors")
        with SafetensorsFolder(tmp_path) as source:
            for entry in model_entries(arch, "lm"):
                for index, part in enumerate(entry.parts):
                    for rank in range(2):
                        piece = piece_of(entry, index, arch, rank, 2, 32)
                        shape = tuple(full[part.name].shape)
                        read = source.read_piece(part.name, shape, piece)
                        assert read.equal(piece.of(full[part.name])), (part.name, rank)


def test_experts_in_one_tensor(tmp_path: Path) -> None:
    """A folder may hold a layer's experts as one tensor; a rank reads its slices of it."""
    gate, up = torch.randn(2, 3, 6, 4)
    down = torch.randn(3, 4, 6)
    tensors = {"m.experts.gate_up_proj": torch.cat((gate, up), 1), "m.experts.down_proj": down}
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = {"gate": gate, "up": up, "down": down}
    with SafetensorsFolder(tmp_path) as source:
        for kind, experts in wanted.items():
            for expert, whole in enumerate(experts):
                name = f"m.experts.{expert}.{kind}_proj.weight"
                shape = tuple(whole.shape)
                for part in (Slice(None), Slice(0, 2, 2), Slice(1, 1, 3)):
                    assert source.read(name, shape, part).equal(part.of(whole)), (name, part)
        with pytest.raises(ModelError, match=r"gate_up_proj' has shape \(3, 12, 4\), .* 10, 4"):
            source.read("m.experts.0.up_proj.weight", (5, 4), Slice(None))
        with pytest.raises(ModelError, match=r"'m\.experts\.down_proj' has shape"):
            source.read("m.experts.3.down_proj.weight", (4, 6), Slice(None))


def test_experts_in_mxfp4_are_read_as_transformers_does(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}
    config = {
        **CONFIG, **sizes, "model_type": "gpt_oss", "num_experts_per_tok": 2,
        "quantization_config": {"quant_method": "mxfp4"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    arch = read_architecture(tmp_path, weights=False)
    assert "quantization_config" not in arch.hf_config
    stored = {}
    whole = {}
    for name, rows, columns in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
        blocks = torch.randint(0, 256, (3, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 140, (3, rows, columns // 32), dtype=torch.uint8)
        full = f"model.layers.0.mlp.experts.{name}"
        stored |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
        whole[full] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, tmp_path / "model.safetensors")
    entries = [
        entry
        for entry in model_entries(arch, "lm")
        if ".layers.0." in entry.megatron and entry.parts[0].name in whole
    ]
    assert len(entries) == 3 * 2
    with SafetensorsFolder(tmp_path) as source:
        for entry in entries:
            shape = tensor_shapes(arch, entry)[entry.parts[0].name]
            for index, part in enumerate(entry.parts):
                for rank in range(2):
                    piece = piece_of(entry, index, arch, rank, 2, 32)
                    read = source.read_piece(part.name, shape, piece)
                    assert read.equal(piece.of(whole[part.name]))
        with pytest.raises(ModelError, match=r"gate_up_proj_blocks' has shape .*\(3, 32, 64\)"):
            source.read("model.layers.0.mlp.experts.gate_up_proj", (3, 32, 64), Slice(None))


def test_a_rank_of_padding_alone() -> None:
    assert tp_slice(Split.VOCAB, (31, 8), rank=1, size=2, padded_vocab=128) == Slice(0, 31, 0)


@pytest.mark.parametrize("split", [Split.COLUMN, Split.ROW, Split.STACKED, Split.QKV])
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
