"""One trainer rank of publish_bytes.py: all ranks send, each to engines of its own.

It writes sent_RANK.json: the bytes of the broadcasts to engines that this process has made.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.megatron.convert.read import read_architecture
from backends.megatron.cpu.shim import importing_megatron, megatron_device

with importing_megatron():
    from backends.megatron.model.gpt import build_chunks, in_dtype, transformer_config
    from backends.megatron.parallel.state import destroy_parallel, init_parallel
    from backends.megatron.weights.export import WeightExporter
from rlcore.config import Config
from rlcore.config.sections.policy import ParallelConfig
from rlcore.interfaces import RankAddress
from rlcore.planning.memory import padded_vocab_size
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import SenderRanks
from rlcore.trainer.weight_publisher import WeightPublisher
from rollout.asyncio_utils import LoopThread
from rollout.engines.embedded.factory import EmbeddedFactory
from rollout.engines.factories import EngineSite
from rollout.fleet.publication import WeightPublication
from rollout.weight_sync.choose import make_sender
from rollout.weight_sync.process_group import WeightGroup
from tests.one_rank import calls_of
from tests.static_participants import StaticParticipants

LIMIT_S = 300.0


class CountedGroups:
    """Counts the bytes that this process has broadcast to engines."""

    def __init__(self) -> None:
        self.sent: list[int] = []  # of each broadcast that succeeded
        send = WeightGroup.send

        def counted(group: WeightGroup, flat: Tensor) -> None:
            send(group, flat)
            self.sent.append(flat.numel() * (group.address.world_size - 1))

        WeightGroup.send = counted  # type: ignore[method-assign]


def run_config(folder: Path, ranks: int, engines: int) -> Config:
    engine = {
        "device": "cpu",
        "threads": 1,
        "count": engines,
        "senders": ranks,
        "start_timeout_s": LIMIT_S,
        "update_timeout_s": LIMIT_S,
    }
    return Config.model_validate(
        {
            "run": {"name": "bytes"},
            "model": {"path": str(folder), "dtype": "bf16"},
            "data": {"paths": "none.jsonl"},
            "training": {"steps": 1},
            "rollout": {"engine": engine},
        }
    )


def build_exporter(folder: Path, layout: ParallelConfig, bucket_bytes: int) -> WeightExporter:
    parallel = init_parallel(layout, timeout_s=LIMIT_S, seed=0)
    arch = read_architecture(folder)
    config = transformer_config(arch, layout, "bf16", torch.device("cpu"), {})
    padded = padded_vocab_size(arch.vocab_size, 1, layout.tensor)
    chunks = in_dtype(build_chunks(arch, config, padded_vocab=padded, value_head=False), config)
    return WeightExporter(chunks, arch, parallel, dtype=torch.bfloat16, bucket_bytes=bucket_bytes)


class Engines:
    """The engine processes and their publications, on rank 0."""

    def __init__(self, config: Config, folder: Path) -> None:
        site = EngineSite(
            config,
            local_ranks=0,
            logs=folder,
            assign_gpus=lambda: [[]] * config.rollout.engine.count,
        )
        self._loop = LoopThread("engines")
        self.engines: Any = EmbeddedFactory.build(site)
        for engine in self.engines:
            self._call(engine.start())
        self.participants = StaticParticipants(self.engines)
        fleet: Any = self.participants
        self.calls = calls_of(WeightPublication(config, fleet), self._loop.loop)

    def close(self) -> None:
        for engine in self.engines:
            self._call(engine.close())
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return self._loop.call(work, seconds=LIMIT_S, what="the engines")


def main() -> None:
    folder = Path(sys.argv[1])
    settings = json.loads((folder / "settings.json").read_text())
    rank = int(os.environ["RANK"])
    ranks = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    counted = CountedGroups()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks
    )
    store = dist.PrefixStore("run", dist.distributed_c10d._get_default_store())
    sync = RankSync(store, rank, ranks, timeout_s=LIMIT_S)
    config = run_config(folder, ranks, settings["engines"])
    layout = ParallelConfig(tensor=1 if ranks % 2 else 2)
    with megatron_device("cpu"):
        exporter = build_exporter(folder, layout, settings["bucket_bytes"])
        engines = None if rank else Engines(config, folder)
        sending = SenderRanks(
            sync,
            make=lambda transport: make_sender(transport, config, torch.device("cpu")),
            address=RankAddress("here"),
            calls=None if engines is None else engines.calls,
        )
        publisher = WeightPublisher(
            SimpleNamespace(
                base=None, buckets=lambda: exporter.buckets, export_buckets=exporter.export_buckets
            ),  # type: ignore[arg-type]
            sync,
            sending,
            journal=None if rank else VersionJournal(folder / "versions.jsonl"),
            timeout_s=LIMIT_S,
        )
        said = publisher.publish(1)
        assert said == "", said
        dist.barrier()
        sending.close()
        if engines is not None:
            assert engines.participants.dropped == {}, engines.participants.dropped
            engines.close()
        destroy_parallel()
    (folder / f"sent_{rank}.json").write_text(json.dumps(sum(counted.sent)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
