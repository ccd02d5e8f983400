"""One trainer rank of publish.py. Rank 0 starts the engines and writes rounds.json."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.convert.read import read_architecture
from backends.megatron.cpu.shim import importing_megatron, megatron_device

with importing_megatron():
    from backends.megatron.model.gpt import build_chunks, in_dtype, transformer_config
    from backends.megatron.parallel.state import ParallelState, init_parallel
    from backends.megatron.weights.export import WeightExporter
from rlcore.config import Config
from rlcore.config.sections.policy import ParallelConfig
from rlcore.planning.memory import padded_vocab_size
from rlcore.stores import bound_store
from rollout.asyncio_utils import LoopThread
from rollout.engines.embedded import factory
from rollout.engines.factories import EngineSite
from rollout.weight_sync.process_group import GroupAddress, WeightGroup
from tests.one_rank import OneRank
from tests.static_participants import StaticParticipants

LIMIT_S = 600.0
HOST = "127.0.0.1"


def build_exporter(folder: Path, bucket_bytes: int) -> tuple[WeightExporter, ParallelState]:
    layout = ParallelConfig(tensor=2)
    parallel = init_parallel(layout, timeout_s=LIMIT_S, seed=0)
    arch = read_architecture(folder)
    config = transformer_config(arch, layout, "bf16", torch.device("cpu"), {})
    padded = padded_vocab_size(arch.vocab_size, 128, layout.tensor)
    chunks = in_dtype(build_chunks(arch, config, padded_vocab=padded, value_head=False), config)
    return (
        WeightExporter(chunks, arch, parallel, dtype=torch.bfloat16, bucket_bytes=bucket_bytes),
        parallel,
    )


class Engines:
    """The engine processes, as rank 0 uses them."""

    def __init__(self, folder: Path, count: int, sizes: list[int]) -> None:
        config = Config.model_validate(
            {
                "run": {"name": "bench"},
                "model": {"path": str(folder), "dtype": "bf16"},
                "data": {"paths": "none"},
                "training": {"steps": 1},
                "rollout": {
                    "engine": {
                        "device": "cpu",
                        "threads": 1,
                        "start_timeout_s": LIMIT_S,
                        "update_timeout_s": LIMIT_S,
                        "count": count,
                    }
                },
            }
        )
        factory.MODULE = "benchmarks.workers.publish_receiver"
        site = EngineSite(config, local_ranks=0, logs=folder, assign_gpus=lambda: [[]] * count)
        self.engines: Sequence[Any] = factory.EmbeddedFactory.build(site)
        self._loop = LoopThread("engines")
        self._sizes = sizes
        self._version = 0
        for engine in self.engines:
            self._call(engine.start())
        self._sink = OneRank(config, StaticParticipants(self.engines), self._loop.loop)
        self._raw = self._join_raw()
        self._buffer = torch.zeros(max(sizes), dtype=torch.uint8)

    def _join_raw(self) -> WeightGroup:
        """Make one group of rank 0 and all engines."""
        store = bound_store(HOST, LIMIT_S)
        address = GroupAddress(HOST, store.port, 1 + len(self.engines), "gloo", LIMIT_S, "raw")

        async def join() -> WeightGroup:
            mine = asyncio.to_thread(
                WeightGroup, address, 0, device=torch.device("cpu"), store=store
            )
            group, *_ = await asyncio.gather(
                mine,
                *(
                    engine._call("raw_join", {"address": address, "rank": 1 + i})
                    for i, engine in enumerate(self.engines)
                ),
            )
            return group

        group: WeightGroup = self._call(join())
        return group

    def publish(self, exporter: WeightExporter, *, digests: bool = True) -> dict[str, float]:
        """Measure a whole publication and its parts on rank 0."""
        self._version += 1
        for engine in self.engines:
            engine.digests_weights = digests
        began = time.perf_counter()
        self._sink.prepare(exporter.buckets)
        prepared = time.perf_counter()
        sending = 0.0
        for bucket, flat in exporter.export_buckets():
            assert flat is not None
            before = time.perf_counter()
            self._sink.send(bucket, flat)
            sending += time.perf_counter() - before
        sent = time.perf_counter()
        self._sink.finish(self._version)
        ended = time.perf_counter()
        return {
            "publish": ended - began,
            "prepare": prepared - began,
            "waiting": sent - prepared - sending,
            "sending": sending,
            "finish": ended - sent,
        }

    def broadcast(self) -> float:
        """Measure the broadcast of the same bytes in the same pieces, between warm memory."""

        async def run() -> None:
            work = [engine._call("raw_receive", {"sizes": self._sizes}) for engine in self.engines]
            await asyncio.gather(asyncio.to_thread(self._send), *work)

        began = time.perf_counter()
        self._call(run())
        return time.perf_counter() - began

    def _send(self) -> None:
        for size in self._sizes:
            self._raw.send(self._buffer[:size])

    def seconds(self) -> dict[str, float]:
        """Seconds of receiving and applying since the last call, of the slowest engine."""

        async def ask() -> list[dict[str, float]]:
            return await asyncio.gather(*(engine._call("seconds") for engine in self.engines))

        answers = self._call(ask())
        return {key: max(answer[key] for answer in answers) for key in ("wire", "apply")}

    def close(self) -> None:
        self._sink.close()
        for engine in self.engines:
            self._call(engine.close())
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return self._loop.call(work, seconds=LIMIT_S, what="the benchmark")


def cpu_seconds(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def all_pids(engines: Engines | None) -> list[int]:
    """CPU seconds of both ranks and, on rank 0, of the engines."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    return [*pids, *([] if engines is None else [engine.pid for engine in engines.engines])]


def gather(parts: list[int], buffer: Tensor) -> float:
    """Measure the gather of rank 1's bytes to rank 0, between warm memory."""
    dist.barrier()
    began = time.perf_counter()
    for size in parts:
        if dist.get_rank() == 0:
            dist.recv(buffer[:size], 1)
        else:
            dist.send(buffer[:size], 0)
    return time.perf_counter() - began


def export_alone(exporter: WeightExporter) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in exporter.export_buckets():
        pass
    return time.perf_counter() - began


def main() -> None:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    default = (
        Config.model_fields["rollout"].get_default(call_default_factory=True).engine.bucket_bytes
    )
    bucket_bytes = default if settings["bucket_mb"] is None else settings["bucket_mb"] << 20
    with megatron_device("cpu"):
        exporter, _ = build_exporter(folder, bucket_bytes)
    sizes = [bucket.num_bytes for bucket in exporter.buckets]
    parts = [
        sum(part.num_bytes for part in exporter._parts(bucket, 1)) for bucket in exporter.buckets
    ]
    buffer = torch.zeros(max(parts), dtype=torch.uint8)
    engines = Engines(folder, settings["receivers"], sizes) if rank == 0 else None
    rounds = []
    pids = all_pids(engines)
    for number in range(settings["rounds"]):
        one: dict[str, float] = {"num_bytes": sum(sizes)}
        order = ("raw", "publish", "plain")
        for what in reversed(order) if number % 2 else order:
            dist.barrier()
            busy = cpu_seconds(pids)
            if what == "raw":
                one["raw_gather"] = gather(parts, buffer)
                if engines is not None:
                    one["raw_broadcast"] = engines.broadcast()
            elif engines is None:
                for _ in exporter.export_buckets():
                    pass
            elif what == "plain":
                one["plain"] = engines.publish(exporter, digests=False)["publish"]
                engines.seconds()
            else:
                one |= engines.publish(exporter) | engines.seconds()
            dist.barrier()
            one[f"{what}_cpu"] = cpu_seconds(pids) - busy
        one["export"] = export_alone(exporter)
        rounds.append(one)
    dist.barrier()
    if engines is not None:
        engines.close()
        (folder / "rounds.json").write_text(json.dumps(rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
