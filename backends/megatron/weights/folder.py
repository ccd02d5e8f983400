"""Writing the weights of all ranks as a Hugging Face folder, or the adapters as PEFT's."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from backends.megatron.convert.architecture import Architecture
from backends.megatron.convert.folder import FolderWriter, carried_tensors
from backends.megatron.convert.peft_folder import settings
from backends.megatron.parallel.agreement import raise_on_all_ranks
from backends.megatron.weights.export import WeightExporter
from rlcore.adapter_folder import ADAPTER_FILE, SETTINGS_FILE
from rlcore.config.sections.policy import LoraConfig
from rlcore.errors import ModelError, RunFailed
from rlcore.hf_folder import write_json
from rlcore.runs.files import sync_tree
from rlcore.weights import PEFT_PREFIX

SHARD_BYTES = 4 << 30  # of one file of an exported folder


def export_hf(
    exporter: WeightExporter,
    folder: Path,
    tokenizer: Path | None = None,
    *,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder that `transformers` loads: shards, index, config, tokenizer.

    Collective. Every rank writes shards of its own into a temporary folder, which rank 0 renames,
    replacing an earlier export.

    Args:
        tokenizer: the folder with the tokenizer's files, by default the model's own.

    Raises ModelError on rank 0 (and RunFailed elsewhere) if the folder holds something else or is
    the model's source.
    """
    arch = exporter.arch
    parallel = exporter.parallel
    sources = (arch.folder, tokenizer or arch.folder)
    failing = partial(raise_on_all_ranks, parallel, f"the export to {folder}")
    with ExitStack() as stack:
        with failing():
            make = partial(
                FolderWriter,
                folder,
                exporter.specs,
                max_shard_bytes,
                sources,
                carried=carried_tensors(arch) if exporter.head == "lm" else (),
                writers=parallel.world_size,
            )
        with failing():
            if parallel.rank == 0:
                writer = make(number=0)
                stack.callback(writer.abandon)
        with failing():
            if parallel.rank != 0:
                writer = make(number=parallel.rank)
        with failing():
            for bucket, flat in exporter.export_buckets(everywhere=True):
                assert flat is not None
                for name, tensor in bucket.views(flat):
                    writer.add(name, tensor)
            writer.complete()
        with failing():
            if parallel.rank == 0:
                writer.finish(arch.hf_config, arch.table.classes[exporter.head == "value"])


def export_peft(exporter: WeightExporter, folder: Path, config: LoraConfig, base: Path) -> None:
    """Write the adapters of a model as a PEFT folder. Collective; rank 0 writes.

    Args:
        exporter: of the adapters.
        base: the weights below them.
    """
    factors: dict[str, Tensor] = {}
    for bucket, flat in exporter.export_buckets():
        if flat is not None:
            factors |= {name: tensor.cpu().clone() for name, tensor in bucket.views(flat)}
    with raise_on_all_ranks(exporter.parallel, f"the export to {folder}"):
        if exporter.parallel.rank == 0:
            write_peft(folder, exporter.arch, config, base, factors)


def write_peft(
    folder: Path, arch: Architecture, config: LoraConfig, base: Path, factors: Mapping[str, Tensor]
) -> None:
    """Write factors, by `<matrix>.lora_A.weight`, as a PEFT folder; it replaces an earlier one.

    Raises ModelError if the folder holds something else, and RunFailed if the disk does.
    """
    if folder.exists() and not (folder / SETTINGS_FILE).is_file() and any(folder.iterdir()):
        raise ModelError(
            f"{folder}: exists and is no PEFT folder; choose another folder for the export"
        )
    aside = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        tensors = {PEFT_PREFIX + name: factor.contiguous() for name, factor in factors.items()}
        save_file(tensors, aside / ADAPTER_FILE, {"format": "pt"})
        write_json(aside / SETTINGS_FILE, settings(arch, config, base))
        # safetensors leaves its files to their owner alone
        shutil.copymode(aside / SETTINGS_FILE, aside / ADAPTER_FILE)
        sync_tree(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise RunFailed(f"the export to {folder} failed: {error}; make room and repeat it") from (
            error
        )
