"""Hugging Face folders are written tensor by tensor: the memory that takes, and a full disk."""

from __future__ import annotations

import errno
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from backends.megatron.convert.folder import FolderWriter
from rlcore.errors import RunFailed
from rlcore.weights import TensorSpec
from tests.limits import no_large_files
from tests.peak_bytes import peak_bytes

# of tensors [ROWS, 64] in fp32: 64 KiB each
ROWS = 256
COUNT = 40
TENSOR_BYTES = ROWS * 64 * 4
SHARD_BYTES = 4 * TENSOR_BYTES


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def specs() -> list[TensorSpec]:
    return [TensorSpec(f"layers.{i}.weight", (ROWS, 64), "float32") for i in range(COUNT)]


def write(folder: Path, source: Path, *, writers: int = 1) -> None:
    """As an export does: each tensor arrives in the same buffer, at every writer."""
    sources = (source, source)
    made = [
        FolderWriter(folder, specs(), SHARD_BYTES, sources, number=number, writers=writers)
        for number in range(writers)
    ]
    buffer = torch.empty(ROWS, 64)
    with ExitStack() as stack:
        stack.callback(made[0].abandon)
        for number, spec in enumerate(specs()):
            for writer in made:
                writer.add(spec.name, buffer.fill_(number))
        for writer in made:
            writer.complete()
        made[0].finish({}, "Model")


def test_no_tensor_is_kept_in_memory(tmp_path: Path, source: Path) -> None:
    peak = peak_bytes(lambda: write(tmp_path / "hf", source))
    assert TENSOR_BYTES <= peak < 1.1 * TENSOR_BYTES, "the buffer that they arrive in"


def test_the_index_leads_to_every_tensor(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "hf", source)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == COUNT * TENSOR_BYTES // SHARD_BYTES
    assert index["metadata"]["total_size"] == COUNT * TENSOR_BYTES
    for number, spec in enumerate(specs()):
        tensor = load_file(tmp_path / "hf" / index["weight_map"][spec.name])[spec.name]
        assert torch.equal(tensor, torch.full((ROWS, 64), float(number)))


def test_several_writers_write_what_one_would(tmp_path: Path, source: Path) -> None:
    write(tmp_path / "one", source)
    write(tmp_path / "three", source, writers=3)
    written = [
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("one", "three")
    ]
    assert written[0] == written[1]


def test_each_of_several_writers_writes_its_own_shards(tmp_path: Path, source: Path) -> None:
    sources = (source, source)
    first, second = (
        FolderWriter(tmp_path / "hf", specs(), SHARD_BYTES, sources, number=n, writers=2)
        for n in range(2)
    )
    for spec in specs():
        second.add(spec.name, torch.zeros(ROWS, 64))
    second.complete()
    shards = COUNT * TENSOR_BYTES // SHARD_BYTES
    assert len(list((tmp_path / ".hf.partial").glob("*.safetensors"))) == shards // 2
    first.abandon()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_shard_that_the_system_refuses(tmp_path: Path, source: Path) -> None:
    message = r"the export to .*/hf failed: .*File too large.*`rlcore export`"
    with pytest.raises(RunFailed, match=message), no_large_files(TENSOR_BYTES):
        write(tmp_path / "hf", source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_an_earlier_export_outlives_a_full_disk(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "hf", source)
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("rlcore.hf_folder._write", full)
    with pytest.raises(RunFailed, match="No space left on device"):
        write(tmp_path / "hf", source)
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before


@pytest.mark.parametrize("refused", ["mkdir", "rename"])
def test_an_earlier_export_outlives_a_folder_that_the_system_refuses(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    write(tmp_path / "hf", source)
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    real = getattr(Path, refused)

    def refuse(path: Path, *arguments: object, **options: object) -> object:
        if path.name == ".hf.partial":
            raise OSError(errno.EIO, "Input/output error")
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, refused, refuse)
    with pytest.raises(RunFailed, match=r"the export to .*hf failed: .*Input/output error"):
        write(tmp_path / "hf", source)
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "source"}
