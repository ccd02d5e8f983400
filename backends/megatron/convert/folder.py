"""Writing an exported model as a Hugging Face folder, which is renamed when it is complete."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.load import SafetensorsFolder
from backends.megatron.convert.read import open_shard
from rlcore.errors import ModelError, RunFailed
from rlcore.hf_folder import ShardWriter, copy_companions, write_json
from rlcore.runs.files import sync, sync_tree
from rlcore.weights import TensorSpec, cut_buckets


@dataclass(frozen=True)
class Carried:
    """A tensor of the model's folder that an export copies."""

    spec: TensorSpec
    file: Path


def carried_tensors(arch: Architecture) -> list[Carried]:
    """The tensors that an export of the language model copies: see `Family.carried`.

    Raises ModelError if a file cannot be read, or has a tensor of a dtype that no model has.
    """
    table = arch.table
    layer = re.compile(re.escape(table.in_folder("model.layers.")) + r"(\d+)\.")
    trained = {name for entry in arch.entries() for name in entry.names} if arch.mtp else set()
    found = []
    with SafetensorsFolder(arch.folder) as source:
        for name in source.names:
            number = layer.match(name)
            behind = number is not None and int(number[1]) >= arch.num_layers
            kept = behind or any(re.match(pattern, name) for pattern in table.carried)
            if kept and name not in trained:
                dtype = str(source.dtype(name)).removeprefix("torch.")
                shape = tuple(source.lazy(name).get_shape())
                found.append(Carried(TensorSpec(name, shape, dtype), source.file_of(name)))
    # A shard has one dtype.
    return sorted(found, key=lambda tensor: tensor.spec.dtype)


class FolderWriter:
    """Writes tensors in the order of `specs` to a temporary folder, which is renamed at the end.

    Several writers share the shards, each of which gets every tensor: number 0 is made first and
    finishes the folder, once every other one has completed its own files.

    Args:
        folder: an earlier export in it is replaced when the new one is complete.
        sources: the folders of the model and its tokenizer.
        carried: tensors that follow, and that every writer reads by itself.
        number, writers: which of several writers this is.

    Raises ModelError if `folder` holds something else, or is one of the sources, and RunFailed as
    `complete` does.
    """

    def __init__(
        self,
        folder: Path,
        specs: Sequence[TensorSpec],
        max_shard_bytes: int,
        sources: Sequence[Path],
        *,
        carried: Sequence[Carried] = (),
        number: int = 0,
        writers: int = 1,
    ) -> None:
        if (
            folder.exists()
            and not (folder / "config.json").is_file()
            and (folder.is_file() or any(folder.iterdir()))
        ):
            raise ModelError(
                f"{folder}: exists and is no Hugging Face folder; choose another folder for the"
                " export"
            )
        if any(folder.resolve() == source.resolve() for source in sources):
            raise ModelError(
                f"{folder}: is what the model was read from; choose another folder for the export"
            )
        self._folder = folder
        self._sources = sources
        self._aside = folder.with_name(f".{folder.name}.partial")
        self._dtype = specs[0].dtype
        self._failure: OSError | None = None
        if number == 0:
            shutil.rmtree(self._aside, ignore_errors=True)
            with self._disk_errors():
                self._aside.mkdir(parents=True)
        self._carried = carried
        shards = cut_buckets([*specs, *(tensor.spec for tensor in carried)], max_shard_bytes)
        self._shards = ShardWriter(self._aside, shards, number=number, writers=writers)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor; its memory may be reused afterwards.

        `complete` raises any disk error: here the other ranks are still sending.
        """
        if self._failure is not None:
            return
        try:
            self._shards.add(name, tensor)
        except OSError as error:
            self._shards.close()
            self._failure = error

    def complete(self) -> None:
        """Copy the carried tensors, and flush this writer's files to the disk.

        Raises RunFailed naming the folder and the reason if something could not be written.
        """
        with self._disk_errors():
            if self._failure is not None:
                raise self._failure
            for tensor in self._carried:
                with open_shard(tensor.file, "pt") as shard:
                    self._shards.add(tensor.spec.name, shard.get_tensor(tensor.spec.name))
            for path in self._shards.files:
                sync(path)

    def abandon(self) -> None:
        """Remove what is not complete; an earlier export is unchanged."""
        self._shards.close()
        shutil.rmtree(self._aside, ignore_errors=True)

    def finish(self, hf_config: dict[str, Any], class_name: str) -> None:
        """Write index and config, copy the rest from the sources, and rename the folder.

        Raises RunFailed as `complete` does.
        """
        with self._disk_errors():
            self._shards.finish()
            write_json(self._aside / "config.json", self._config(hf_config, class_name))
            copy_companions(self._aside, self._sources[0], self._sources[-1])
            sync_tree(self._aside)
            replaced = self._folder.with_name(f".{self._folder.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            if self._folder.exists():
                self._folder.rename(replaced)
            try:
                self._aside.rename(self._folder)
            except OSError:
                if replaced.exists():
                    replaced.rename(self._folder)
                raise
            sync(self._folder.parent)
            shutil.rmtree(replaced, ignore_errors=True)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunFailed(
                f"the export to {self._folder} failed: {error}; the weights are in the last"
                " checkpoint: make room and write them by `rlcore export`, or continue the run"
                " with --resume"
            ) from error

    def _config(self, hf_config: dict[str, Any], class_name: str) -> dict[str, Any]:
        """The source's config with the exported class and dtype, and one label for a value head."""
        config = {**hf_config, "architectures": [class_name], "dtype": self._dtype}
        # The spelling before transformers 5.
        if "torch_dtype" in config:
            config["torch_dtype"] = self._dtype
        if class_name.endswith("ForSequenceClassification"):
            config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return config
