"""A rank of test_failing_ranks.py: one rank fails, and each writes down what it raised."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from errno import ENOSPC
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from cases import make_config
from rank_main import build_backend, main

from backends.megatron import MegatronBackend
from backends.megatron.cpu.shim import importing_megatron
from backends.megatron.weights.export import WeightExporter
from rlcore.errors import RlcoreError

with importing_megatron():
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync


def build(case: dict[str, Any], models: Path, *, with_reference: bool) -> MegatronBackend:
    config = make_config(case, models)
    return build_backend(config, reference=with_reference, total_steps=0)


def load(case: dict[str, Any], models: Path) -> None:
    """Each rank reads folders of its own, as on machines with a disk each."""
    models = models / str(int(case["rank"]))
    build(case, models, with_reference="reference" in case).close()


def publish(case: dict[str, Any], models: Path) -> None:
    """Round weights of which one rank has an infinity, then the healed ones."""
    backend = build(case, models / "0", with_reference=False)
    plain = backend._exports.published.exporter
    exporter = WeightExporter(
        backend.policy.chunks, plain.arch, backend.parallel, dtype=torch.float32,
        bucket_bytes=20_000, quantised=True, sharing=plain,
    )  # fmt: skip
    assert len(exporter.buckets) > 4
    here = backend.rank == case["failing"]
    name = next(one for one in exporter._params if one.endswith(case["parameter"]))
    weight = exporter._params[name].data
    kept = weight.clone()
    if here:
        weight.view(-1)[5] = float("inf")
    count = 0
    try:
        for _ in exporter.export_buckets(everywhere=case["everywhere"]):
            count += 1
    finally:
        assert count == len(exporter.buckets), "a rank left while others go on"
        if here:
            weight.copy_(kept)
        assert sum(1 for _ in exporter.export_buckets(everywhere=case["everywhere"])) == count
        backend.close()


def save(case: dict[str, Any], models: Path) -> None:
    """Plan a checkpoint, at which one rank fails, then another, at which all have to plan again."""
    backend = build(case, models / "0", with_reference=False)
    full = OSError(ENOSPC, "No space left on device")
    here = backend.rank == case["failing"]
    failing = patch.object(FileSystemWriterAsync, "prepare_write_data", side_effect=full)
    try:
        with failing if here else nullcontext():
            backend.save(models / "first")
    finally:
        backend.save(models / "second")
        backend.load(models / "second")
        backend.close()


def run(case: dict[str, Any], folder: Path) -> None:
    import torch.distributed as dist

    rank = dist.get_rank()
    began = time.monotonic()
    try:
        work = publish if "parameter" in case else save if "saves" in case else load
        work({**case, "rank": rank}, folder.parent / "models")
    except RlcoreError as error:
        said = [type(error).__name__, str(error)]
    else:
        said = ["nothing", ""]
    told = {"said": said, "seconds": time.monotonic() - began}
    (folder / f"{case['name']} {rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(run)
