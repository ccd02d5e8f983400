"""Writing a Hugging Face folder: streamed safetensors shards, index, config and tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from rlcore.errors import ModelError, RunFailed
from rlcore.runs.files import remove_tree, sync, sync_tree
from rlcore.weights import TensorSpec, cut_buckets

# Tokenizer, chat template, generation settings, custom code: by suffix, since tokenizers may bring files of any name.
_COPIED = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}
_WRITTEN = {"config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"}


class FolderWriter:
    """Takes the tensors in the order of `specs`, writes a shard as soon as it is full, and renames the folder at the end.

    So it holds one shard at a time: `max_shard_bytes`, or a single tensor that is larger. `sources` are the folders that the
    model and its tokenizer came from. An earlier export in `folder` is replaced when the new one is whole.

    Raises ModelError where `folder` holds something else, or is one of the sources.
    """

    def __init__(
        self, folder: Path, specs: Sequence[TensorSpec], max_shard_bytes: int, sources: Sequence[Path]
    ) -> None:
        if folder.exists() and not (folder / "config.json").is_file() and (folder.is_file() or any(folder.iterdir())):
            raise ModelError(f"{folder}: exists and is no Hugging Face folder; choose another folder for the export")
        if any(folder.resolve() == source.resolve() for source in sources):
            raise ModelError(f"{folder}: is what the model was read from; choose another folder for the export")
        self._folder, self._sources = folder, sources
        self._aside = folder.with_name(f".{folder.name}.partial")
        self._shards = cut_buckets(specs, max_shard_bytes)
        self._dtype = specs[0].dtype
        self._pending: dict[str, Tensor] = {}
        self._shard = 0
        self._failure: Exception | None = None
        if self._aside.exists():
            shutil.rmtree(self._aside)
        self._aside.mkdir(parents=True)

    def add(self, name: str, tensor: Tensor) -> None:
        """Take the next tensor; it is copied, so its memory may be reused.

        A disk that refuses it is the business of `finish`: the other ranks are in the middle of sending.
        """
        if self._failure is not None:
            return
        self._pending[name] = tensor.detach().to("cpu", copy=True)
        if len(self._pending) == len(self._shards[self._shard].tensors):
            try:
                save_file(self._pending, self._aside / self._file_name(self._shard), metadata={"format": "pt"})
            except (OSError, SafetensorError) as error:
                self._failure = error
            self._pending = {}
            self._shard += 1

    def finish(self, hf_config: dict[str, Any], class_name: str) -> None:
        """Write index and config, copy the rest from the sources, and put the folder in its place.

        Raises RunFailed naming the folder and the reason where something could not be written; nothing of it is left then,
        and an earlier export is what it was.
        """
        try:
            if self._failure is not None:
                raise self._failure
            self._put_in_place(hf_config, class_name)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self._aside, ignore_errors=True)
            raise RunFailed(
                f"the export to {self._folder} failed: {error}; the weights are in the last checkpoint: make room and write "
                f"them by `rlcore export`, or continue the run with --resume"
            ) from error

    def _put_in_place(self, hf_config: dict[str, Any], class_name: str) -> None:
        assert self._shard == len(self._shards), "finish() before every tensor was added"
        if len(self._shards) > 1:
            self._write_json("model.safetensors.index.json", self._index())
        self._write_json("config.json", self._config(hf_config, class_name))
        self._copy_companions()
        sync_tree(self._aside)
        if self._folder.exists():
            remove_tree(self._folder)
        self._aside.rename(self._folder)
        sync(self._folder.parent)

    def _copy_companions(self) -> None:
        """The tokenizer folder's files; of a model folder apart from it, only how to generate."""
        model, tokenizer = self._sources[0], self._sources[-1]
        companions = [model / "generation_config.json"]
        companions += [path for path in sorted(tokenizer.iterdir()) if path.suffix in _COPIED and path.name not in _WRITTEN]
        for path in companions:
            if path.is_file():
                shutil.copyfile(path, self._aside / path.name)

    def _file_name(self, shard: int) -> str:
        count = len(self._shards)
        return "model.safetensors" if count == 1 else f"model-{shard + 1:05d}-of-{count:05d}.safetensors"

    def _index(self) -> dict[str, Any]:
        return {
            "metadata": {"total_size": sum(shard.num_bytes for shard in self._shards)},
            "weight_map": {t.name: self._file_name(shard.index) for shard in self._shards for t in shard.tensors},
        }

    def _config(self, hf_config: dict[str, Any], class_name: str) -> dict[str, Any]:
        """The source's config; only class, dtype and (for a value head) the number of labels follow what is written."""
        config = {**hf_config, "architectures": [class_name], "dtype": self._dtype}
        if "torch_dtype" in config:         # the spelling before transformers 5
            config["torch_dtype"] = self._dtype
        if class_name.endswith("ForSequenceClassification"):
            config |= {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return config

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        (self._aside / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
