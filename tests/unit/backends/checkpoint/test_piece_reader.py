"""Saved tensors are read a piece at a time: any box of them, with the check of their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.checkpoint import pieces
    from backends.megatron.checkpoint.pieces import PieceReader
    from backends.megatron.checkpoint.shards import read_errors
    from backends.megatron.checkpoint.to_hf import _Into
from rlcore.errors import ModelError

# saving in one process, as is meant here
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAVED = {
    "rows": torch.arange(600.0).view(50, 12),
    "layer": torch.arange(600).view(1, 1, 50, 12).to(torch.bfloat16),
    "flat": torch.arange(1000, dtype=torch.int32),
    "turned": torch.arange(600.0).view(12, 50).t(),
    "one row": torch.arange(700.0).view(1, 700),
    "wide": torch.arange(1200.0).view(2, 600),  # a row is larger than a piece
    "small": torch.arange(3.0),
    "scalar": torch.tensor(7.0),
}
PIECE = 2000  # bytes; the form of a saved tensor takes 1200 of its own


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(pieces, "PIECE_BYTES", PIECE)
    dcp.save(dict(SAVED), checkpoint_id=tmp_path / "saved", no_dist=True)
    return tmp_path / "saved"


def read(
    folder: Path, name: str, offsets: list[int], sizes: list[int], dtype: torch.dtype
) -> Tensor:
    reader = PieceReader(folder)
    metadata = reader.read_metadata()
    assert reader.read_metadata() is metadata
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    out = torch.full(sizes, -1).to(dtype)
    box = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    stored = metadata.state_dict_metadata[name]
    items = create_read_items_for_chunk_list(name, stored, [box])  # type: ignore[arg-type]
    reader.read_data(dcp.LoadPlan(items), _Into(out)).wait()
    return out


@pytest.mark.parametrize("name", SAVED)
def test_a_whole_tensor(folder: Path, name: str) -> None:
    expected = SAVED[name]
    got = read(folder, name, [0] * expected.dim(), [*expected.shape], expected.dtype)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    ("name", "offsets", "sizes"),
    [
        ("rows", [20, 0], [7, 12]),
        ("rows", [3, 5], [44, 4]),
        ("rows", [49, 11], [1, 1]),
        ("layer", [0, 0, 30, 2], [1, 1, 20, 9]),
        ("flat", [313], [400]),
        ("turned", [10, 1], [5, 3]),
        ("one row", [0, 300], [1, 399]),
        ("wide", [1, 100], [1, 300]),
    ],
)
def test_a_box_of_a_tensor(folder: Path, name: str, offsets: list[int], sizes: list[int]) -> None:
    expected = SAVED[name]
    for dim, (start, size) in enumerate(zip(offsets, sizes)):
        expected = expected.narrow(dim, start, size)
    assert torch.equal(read(folder, name, offsets, sizes, expected.dtype), expected)
    # into another dtype as `copy_` does it
    assert torch.equal(read(folder, name, offsets, sizes, torch.float64), expected.double())


def test_plain_tensors_are_not_held_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch's own reader gets: what is small, and what is saved in another order."""
    left: list[str] = []
    original = dcp.FileSystemReader.read_data

    def others(self: PieceReader, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> object:
        left.extend(str(item.storage_index.fqn) for item in plan.items)
        return original(self, plan, planner)

    monkeypatch.setattr(dcp.FileSystemReader, "read_data", others)
    for name, tensor in SAVED.items():
        read(folder, name, [0] * tensor.dim(), [*tensor.shape], tensor.dtype)
    # torch saves what is turned as it is read
    assert set(left) <= {"small", "scalar", "turned"}
    assert {"small", "scalar"} <= set(left)


def test_other_bytes_and_an_early_end_are_errors(folder: Path) -> None:
    [file] = folder.glob("*.distcp")
    content = file.read_bytes()
    at = content.index(SAVED["rows"][30].numpy().tobytes())
    for damaged in (content[:at] + b"\xff" + content[at + 1 :], content[: at + 20]):
        file.write_bytes(damaged)
        with pytest.raises(ModelError, match="cannot be loaded"), read_errors(folder):
            read(folder, "rows", [0, 0], [10, 12], torch.float32)  # the damage is behind these
    file.write_bytes(content[:at] + b"\xff" + content[at + 1 :])
    told = "a file holds other bytes than were written"
    with pytest.raises(ModelError, match=told), read_errors(folder):
        read(folder, "rows", [0, 0], [50, 12], torch.float32)
