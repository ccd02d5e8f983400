"""A rank of test_publication_rules.py: import a tiny model, export it with the real exporter."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from backends.megatron.cpu.shim import importing_megatron, megatron_device

with importing_megatron():
    from backends.megatron.parallel.state import ParallelState, destroy_parallel, init_parallel
    from backends.megatron.weights import export
    from backends.megatron.weights.export import WeightExporter

from rlcore.config.sections.policy import ParallelConfig
from rlcore.quantised_weights import quantise_bucket, quantised_bucket
from rlcore.weights import Bucket
from tests import nccl_rules
from tests.nccl_rules.recording import record
from tests.parity.rank_main import load_chunks, main

T = TypeVar("T")
R = TypeVar("R")
HOLD_S = 2.0  # rank 0 keeps the first bucket for so long, and until another has begun one
BEGIN_S = 60.0


def exporter_of(
    source: Path,
    layout: ParallelConfig,
    parallel: ParallelState,
    bucket_bytes: int,
    sharing: WeightExporter | None = None,
) -> WeightExporter:
    """An exporter; in FP8 if it shares the group of another one."""
    arch, _, chunks = load_chunks(source, layout, parallel)
    return WeightExporter(
        chunks,
        arch,
        parallel,
        dtype=torch.float32,
        bucket_bytes=bucket_bytes,
        quantised=sharing is not None,
        sharing=sharing,
    )


def publish(exporter: WeightExporter) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The weights on rank 0, and the buckets that each rank enqueued while it held the first."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    count = store.add(f"exports/{rank}", 1)
    send = exporter._send

    def counted(*arguments: Any) -> list[dist.Work]:
        store.add(f"enqueued/{count}/{rank}", 1)
        return send(*arguments)

    exporter._send = counted  # type: ignore[method-assign]
    weights: dict[str, torch.Tensor] = {}
    enqueued: list[int] = []
    for bucket, flat in exporter.export_buckets():
        if flat is None:
            continue
        weights |= {name: tensor.clone() for name, tensor in bucket.views(flat)}
        if bucket.index == 0:
            enqueued = counted_meanwhile(f"enqueued/{count}")
    return weights, enqueued


def counted_meanwhile(name: str) -> list[int]:
    """What the other ranks count while this one waits."""
    store = dist.distributed_c10d._get_default_store()
    keys = [f"{name}/{peer}" for peer in range(1, dist.get_world_size())]
    time.sleep(HOLD_S)
    end = time.monotonic() + BEGIN_S
    while not any(found := [store.add(key, 0) for key in keys]) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def share(exporter: WeightExporter) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The weights, which every rank gets, and the ranks that assembled a bucket."""
    weights: dict[str, torch.Tensor] = {}
    for bucket, flat in exporter.export_buckets(everywhere=True):
        assert flat is not None
        weights |= {name: tensor.clone() for name, tensor in bucket.views(flat)}
    return weights, sorted({exporter._root(bucket) for bucket in exporter.buckets})


def compare_quantised(exporter: WeightExporter, small: WeightExporter) -> None:
    """Buckets in FP8 are those that a rank makes of the whole ones by itself."""
    for everywhere in (True, False):
        whole = [
            None if flat is None else flat.clone()
            for _, flat in exporter.export_buckets(everywhere=everywhere)
        ]
        count = 0
        for bucket, flat in small.export_buckets(everywhere=everywhere):
            count += 1
            assert bucket == quantised_bucket(small.buckets[bucket.index])
            assert bucket == small.layout[bucket.index]
            expected = whole[bucket.index]
            assert (flat is None) == (expected is None)
            if flat is not None and expected is not None:
                own = quantise_bucket(small.buckets[bucket.index], expected)
                assert torch.equal(flat, own), (everywhere, bucket.index)
        assert count == len(exporter.buckets)


def on_this_thread(make: Callable[[T], R], items: Sequence[T], device: object) -> Iterator[R]:
    """As `prefetched` on CUDA, where calls return when their work is enqueued."""
    pending = make(items[0])
    for following in items[1:]:
        made = pending
        pending = make(following)
        yield made
    yield pending


def begun_ahead(exporter: WeightExporter) -> list[int]:
    """The buckets that each rank has begun while rank 0 held the first, where all get them."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    count = store.add(f"shares/{rank}", 1)
    root = exporter._root

    def counted(bucket: Bucket) -> int:
        store.add(f"begun/{count}/{rank}", 1)
        return root(bucket)

    exporter._root = counted  # type: ignore[method-assign]
    if rank != 0:
        export.prefetched = on_this_thread
    begun: list[int] = []
    for bucket, _ in exporter.export_buckets(everywhere=True):
        if rank == 0 and bucket.index == 0:
            begun = counted_meanwhile(f"begun/{count}")
    return begun


def run(case: dict[str, Any], folder: Path) -> None:
    layout = ParallelConfig(**case["parallel"])
    export._ALONE_BYTES = case["alone_bytes"]
    with megatron_device("cpu"):
        parallel = init_parallel(layout, timeout_s=60, seed=0)
        exporter = exporter_of(Path(case["model"]), layout, parallel, case["bucket_bytes"])
        shared, roots = share(exporter)
        small = exporter_of(
            Path(case["model"]), layout, parallel, case["bucket_bytes"], sharing=exporter
        )
        compare_quantised(exporter, small)
        orders = [record(export, exporter, everywhere=everywhere) for everywhere in (False, True)]
        told_orders = folder / f"{case['name']}_{parallel.rank}.orders.json"
        told_orders.write_text(json.dumps([asdict(order) for order in orders]))
        save_file(shared, folder / f"{case['name']}_{parallel.rank}.safetensors")
        if parallel.rank == 0:
            begun = begun_ahead(exporter)
            weights, enqueued = publish(exporter)
            group = dist.get_process_group_ranks(exporter._group)
            told = {
                "group": group,
                "enqueued": enqueued,
                "begun": begun,
                "roots": roots,
                "buckets": len(exporter.buckets),
            }
            (folder / f"{case['name']}.json").write_text(json.dumps(told))
            save_file(weights, folder / f"{case['name']}.safetensors")
        else:
            with nccl_rules.guard():  # as on CUDA, no wait() holds the host
                begun_ahead(exporter)
                nccl_rules.synchronize()
                publish(exporter)
                nccl_rules.synchronize()
        dist.monitored_barrier(parallel.control_group, timedelta(seconds=60))
        destroy_parallel()


if __name__ == "__main__":
    main(run)
