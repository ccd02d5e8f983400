"""Refuses pickles in checkpoints that would run code.

torch reads `.metadata`, and objects in shards, with a bare unpickler, which calls any function that
the file names. Here an unpickler that knows only the few classes of checkpoints reads each of them
first. This does not protect against a file that is replaced between the two reads: load only
checkpoints that you trust.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from backends.megatron.cpu.shim import replaced
from rlcore.errors import ModelError

METADATA = ".metadata"
_OF_CHECKPOINTS = "torch.distributed.checkpoint"
_ALLOWED = frozenset(
    {
        *((f"{_OF_CHECKPOINTS}.metadata", name) for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )),
        *((f"{_OF_CHECKPOINTS}.planner", name) for name in (
            "BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType",
        )),
        (f"{_OF_CHECKPOINTS}.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
    }
)  # fmt: skip
_REFUSED_BY_TORCH = re.compile(r"GLOBAL (\S+)")


def check_metadata(folder: Path) -> None:
    """Read the metadata of the shards in `folder` without running any code.

    Raises:
        ModelError: the metadata names something that no checkpoint needs.
        OSError, UnpicklingError: the metadata cannot be read.
    """
    path = folder / METADATA
    content = path.read_bytes()
    try:
        # The unpickler would allocate memory up to a memo's index. The check takes about a
        # microsecond per operation.
        for operation, argument, _ in pickletools.genops(content):
            if "PUT" in operation.name and int(argument or 0) > len(content):
                raise ValueError(f"memo index {argument} in a pickle of {len(content)} bytes")
        _AllowListed(io.BytesIO(content), path).load()
    except (ModelError, pickle.UnpicklingError):
        raise
    # A damaged pickle may call allowed classes with any arguments, so any error is possible.
    except Exception as error:
        raise pickle.UnpicklingError(f"{METADATA} is damaged: {error!r}") from error


@contextmanager
def checking_objects(folder: Path) -> Iterator[None]:
    """Inside, torch's and Megatron's planners read only objects that `weights_only` allows.

    Megatron's inherits torch's, which also reads the common state from megatron-core 0.17 on.
    """
    stock = DefaultLoadPlanner.load_bytes

    def load_bytes(self: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            with torch.serialization.safe_globals([io.BytesIO]):
                torch.load(value, weights_only=True, map_location="cpu")
        except pickle.UnpicklingError as error:
            found = _REFUSED_BY_TORCH.search(str(error))
            if found is None:
                raise
            raise _refusal(f"{folder}: the object {read_item.dest_index.fqn}", found[1]) from None
        value.seek(0)
        stock(self, read_item, value)

    with replaced(DefaultLoadPlanner, "load_bytes", load_bytes):
        yield


class _AllowListed(pickle.Unpickler):
    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or function; see `pickle.Unpickler`."""
        if (module, name) == ("builtins", "getattr"):
            return self._enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED:
            raise _refusal(str(self._path), f"{module}.{name}")
        return super().find_class(module, name)

    def _enum_member(self, owner: Any, name: str) -> Enum:
        """Do what `getattr` does in a pickle of Python 3.11.2: look up a member."""
        if not (isinstance(owner, type) and issubclass(owner, Enum) and name in owner.__members__):
            raise _refusal(str(self._path), f"builtins.getattr of {owner!r} and {name!r}")
        return owner[name]


def _refusal(where: str, what: str) -> ModelError:
    return ModelError(
        f"{where} is refused: it would load {what}, which no checkpoint of rlcore holds and which"
        " may run code; load only checkpoints that you trust"
    )
