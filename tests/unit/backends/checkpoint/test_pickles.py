"""A checkpoint cannot run code: not by its metadata, and not by an object in its shards."""

from __future__ import annotations

import enum
import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    from backends.megatron.checkpoint.pickles import METADATA, check_metadata
    from backends.megatron.checkpoint.shards import plan_sharded, read_errors, read_sharded
    from backends.megatron.checkpoint.to_hf import StoredParameters
from rlcore.errors import ModelError

pytestmark = pytest.mark.usefixtures("one_rank")


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return os.mkdir, (str(self.path),)


def state(held: object) -> dict[str, Any]:
    return {
        "weight": ShardedTensor.from_rank_offsets("weight", torch.arange(4.0)),
        "extra": ShardedObject("extra", held, (1,), (0,)),
    }


def saved(folder: Path, held: object) -> Path:
    folder.mkdir()
    planned = plan_sharded(state(held), folder)
    planned.write()
    planned.finish()
    return folder


def test_what_rlcore_writes_is_read(tmp_path: Path) -> None:
    """Transformer Engine keeps its state in a BytesIO."""
    for index, held in enumerate((None, io.BytesIO(b"scales"), torch.ones(2), {"a": [1, "b"]})):
        folder = saved(tmp_path / str(index), held)
        found = read_sharded(state(None), folder)
        assert torch.equal(found["weight"], torch.arange(4.0))
        if isinstance(held, io.BytesIO):
            assert found["extra"].getvalue() == b"scales"
        elif isinstance(held, torch.Tensor):
            assert torch.equal(found["extra"], held)
        else:
            assert found["extra"] == held


def by_getattr(member: enum.Enum, protocol: int) -> tuple[Any, tuple[Any, ...]]:
    """Reduce a member of an enumeration as Python 3.11.2 does, which Debian 12 has."""
    return getattr, (member.__class__, member.name)


def test_metadata_of_every_python_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enum.Enum, "__reduce_ex__", by_getattr)
    folder = saved(tmp_path / "a", None)
    assert b"getattr" in (folder / METADATA).read_bytes()
    assert torch.equal(read_sharded(state(None), folder)["weight"], torch.arange(4.0))


class Reached:
    """Looks up an attribute when it is unpickled."""

    def __init__(self, owner: object, name: str) -> None:
        self.found = owner, name

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return getattr, self.found


@pytest.mark.parametrize(
    ("owner", "name"), [(Metadata, "__init__"), (WriteItemType, "__class__"), ("text", "format")]
)
def test_no_other_attribute_is_looked_up(tmp_path: Path, owner: object, name: str) -> None:
    folder = saved(tmp_path / "a", None)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.planner_data = Reached(owner, name)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ModelError, match=r"is refused: it would load builtins\.getattr of "):
        check_metadata(folder)


@pytest.mark.parametrize(
    "read",
    [lambda folder: read_sharded(state(None), folder), StoredParameters],
    ids=["resume", "export"],
)
def test_metadata_that_would_run_code_is_refused(tmp_path: Path, read: Any) -> None:
    folder = saved(tmp_path / "a", None)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    metadata.planner_data = Planted(tmp_path / "ran")
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(ModelError, match=r"\.metadata is refused: it would load posix\.mkdir"):
        read(folder)
    assert not (tmp_path / "ran").exists()
    pickle.loads((folder / METADATA).read_bytes())
    assert (tmp_path / "ran").exists(), "it would have"


def test_an_object_that_would_run_code_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", Planted(tmp_path / "ran"))
    with pytest.raises(ModelError, match=r"posix\.mkdir"), read_errors(folder):
        read_sharded(state(None), folder)
    assert not (tmp_path / "ran").exists()


def test_damaged_metadata_is_still_said_to_be_damaged(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", None)
    (folder / METADATA).write_bytes(b"\x80\x04junk")
    expected = pytest.raises(ModelError, match="holds other bytes than were written")
    with expected, read_errors(folder):
        read_sharded(state(None), folder)


def test_metadata_does_not_choose_how_much_memory_is_taken(tmp_path: Path) -> None:
    """An unpickler allocates all places of its memo up to the one that is named."""
    (tmp_path / METADATA).write_bytes(b"\x80\x04Nr" + (1 << 20).to_bytes(4, "little") + b".")
    with pytest.raises(pickle.UnpicklingError, match="memo index 1048576 in a pickle"):
        check_metadata(tmp_path)
