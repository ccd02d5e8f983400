"""Writing the weights of all ranks as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from backends.megatron.convert.folder import FolderWriter
from backends.megatron.parallel.agreement import raise_on_all_ranks
from backends.megatron.weights.export import WeightExporter

SHARD_BYTES = 4 << 30  # of one file of an exported folder


def export_hf(
    exporter: WeightExporter,
    folder: Path,
    tokenizer: Path | None = None,
    *,
    max_shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a Hugging Face folder that `transformers` loads: shards, index, config, tokenizer.

    Collective. Rank 0 writes a temporary folder and renames it, replacing an earlier export.

    Args:
        tokenizer: the folder with the tokenizer's files, by default the model's own.

    Raises ModelError on rank 0 (and RunFailed elsewhere) if the folder holds something else or is
    the model's source.
    """
    arch = exporter.arch
    parallel = exporter.parallel
    writer = None
    with raise_on_all_ranks(parallel, f"the export to {folder}"):
        if parallel.rank == 0:
            writer = FolderWriter(
                folder, exporter.specs, max_shard_bytes, (arch.folder, tokenizer or arch.folder)
            )
    with raise_on_all_ranks(parallel, f"the export to {folder}"):
        for bucket, flat in exporter.export_buckets():
            if writer is not None and flat is not None:
                for name, tensor in bucket.views(flat):
                    writer.add(name, tensor)
        if writer is not None:
            writer.finish(arch.hf_config, arch.table.classes[exporter.head == "value"])
