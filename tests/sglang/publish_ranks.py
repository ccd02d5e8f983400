"""One rank of a Megatron world that publishes to a server which runs already: `publish_ranks.py
FOLDER`, see test_worlds.py.

FOLDER/payload.json: layout; server (config, url, keys); models (folders, published in turn);
    transports. Rank 0 writes what the
server said and generated after each publication to FOLDER/told.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from publication_kit import (
    TOLERANCE,
    Oracle,
    connect,
    folder_weights,
    request,
    run_config,
    sink_over,
)

from backends.megatron.cpu.shim import importing_megatron, megatron_device

with importing_megatron():
    from backends.megatron.parallel.state import ParallelState, destroy_parallel, init_parallel
    from backends.megatron.weights.export import WeightExporter

from rlcore.config import Config
from rlcore.config.sections.policy import ParallelConfig
from rlcore.config.sections.rollout import EngineConfig
from rlcore.interfaces import RankAddress
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import SenderRanks
from rlcore.trainer.weight_publisher import WeightPublisher
from rollout.asyncio_utils import LoopThread
from rollout.engines.factories import Keys
from rollout.engines.sglang.engine import SGLangEngine
from rollout.fleet.publication import WeightPublication
from rollout.weight_sync.assignment import SenderAssignment
from rollout.weight_sync.choose import make_sender
from tests.one_rank import calls_of
from tests.parity.rank_main import joined, load_chunks
from tests.parity.rank_main import payload as payload_of
from tests.static_participants import StaticParticipants

BUCKET_BYTES = 20_000
HANDLES = "handles"  # the transport `tensor`, with a handle from each rank
# the transport `distributed`, with the last rank as the engine's sender, and all others to help it
SENDER = "sender"


def main() -> None:
    folder = Path(sys.argv[1])
    given = payload_of(folder)
    layout = ParallelConfig(**given["layout"])
    with joined(folder), megatron_device("cpu"):
        parallel = init_parallel(layout, timeout_s=120, seed=0)
        told = [
            publish(given, layout, parallel, transport, Path(model), version)
            for version, (transport, model) in enumerate(given["publications"], 1)
        ]
        if parallel.rank == 0:
            (folder / "told.json").write_text(json.dumps(told))
        destroy_parallel()


def publish(
    payload: dict[str, Any],
    layout: ParallelConfig,
    parallel: ParallelState,
    transport: str,
    model: Path,
    version: int,
) -> dict[str, Any]:
    """Load `model` into this world's layout and publish it. Returns the result, on rank 0."""
    exporter = export_of(model, layout, parallel)
    if transport in (HANDLES, SENDER):
        return publish_as_a_run(payload, exporter, model, version, transport)
    if parallel.rank != 0:
        for _ in exporter.export_buckets():
            pass
        return {}
    loop, engine = engine_of(payload, model, transport)
    sink, participants = sink_over(engine_config(payload, model, transport), [engine], loop)
    sink.prepare(exporter.buckets)
    for bucket, flat in exporter.export_buckets():
        assert flat is not None
        sink.send(bucket, flat)
    sink.finish(version)
    sink.close()
    told = what_it_holds(model, engine, loop)
    return {"dropped": participants.dropped, "buckets": len(exporter.buckets), **told} | {
        "transport": transport
    }


def publish_as_a_run(
    payload: dict[str, Any], exporter: WeightExporter, model: Path, version: int, kind: str
) -> dict[str, Any]:
    """Publish by all ranks: to an engine on their GPUs each gives its own handles, and an engine of
    the last rank is sent to by that.

    The ranks pretend to be on GPUs; without any, a handle holds the bytes that its rank has.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    store = dist.PrefixStore(kind, dist.distributed_c10d._get_default_store())
    sync = RankSync(store, rank, size, timeout_s=60.0)
    by_handle = kind == HANDLES
    config = engine_config(payload, model, "tensor" if by_handle else "distributed")
    calls = journal = participants = engine = None
    if rank == 0:
        loop, engine = engine_of(payload, model, config.rollout.engine.transport)
        # its first rank is on the last GPU of the trainer
        engine.server.gpus = tuple(f"gpu-{k}" for k in reversed(range(size)))[: engine.group_ranks]
        SenderAssignment.assign = lambda *_: (size - 1, *range(size - 1))  # type: ignore[method-assign]
        participants = StaticParticipants([engine])
        calls = calls_of(WeightPublication(config, participants), loop.loop)
        journal = VersionJournal(Path(payload["runs"]) / f"{kind}.jsonl", newest=version - 1)
    ranks = SenderRanks(
        sync,
        make=lambda transport: make_sender(transport, config, torch.device("cpu")),
        address=RankAddress("here", None, f"gpu-{rank}"),
        calls=calls,
    )
    backend = SimpleNamespace(
        base=None, buckets=lambda: exporter.buckets, export_buckets=exporter.export_buckets
    )
    publisher = WeightPublisher(backend, sync, ranks, journal=journal, timeout_s=60.0)
    assert publisher.publish(1) == ""
    assert ranks._gathers == by_handle
    if not by_handle:
        assert [*ranks._sender._groups] == ["engine-0"]
    ranks.close()
    if rank != 0:
        return {}
    told = what_it_holds(model, engine, loop)
    return {"dropped": participants.dropped, "buckets": len(exporter.buckets), **told} | {
        "transport": kind
    }


def engine_config(payload: dict[str, Any], model: Path, transport: str) -> Config:
    engine = EngineConfig(**payload["server"]["config"])
    return run_config(str(model), Path(payload["runs"]), engine, transport=transport)


def engine_of(
    payload: dict[str, Any], model: Path, transport: str
) -> tuple[LoopThread, SGLangEngine]:
    server = payload["server"]
    config = engine_config(payload, model, transport)
    loop = LoopThread("engines")
    engine = connect(config, server["url"], Keys(**server["keys"]), loop)
    engine.managed = True  # on this machine, whoever started it: what the delta transport asks
    return loop, engine


def what_it_holds(model: Path, engine: SGLangEngine, loop: LoopThread) -> dict[str, Any]:
    """Compare the server's log-probs with those of the model's folder."""
    weights = folder_weights(model)
    [[completion]] = loop.call(engine.generate([request()]), seconds=60, what="a response")
    error = Oracle(model, weights).errors(request().prompt.tolist(), completion).max()
    loop.call(engine.close(), seconds=60, what="closing")
    loop.close()
    return {
        "logprobs_agree": bool(error < TOLERANCE),
        "versions": [span.version for span in completion.versions],
    }


def export_of(model: Path, layout: ParallelConfig, parallel: ParallelState) -> WeightExporter:
    arch, _, chunks = load_chunks(model, layout, parallel)
    return WeightExporter(chunks, arch, parallel, dtype=torch.float32, bucket_bytes=BUCKET_BYTES)


if __name__ == "__main__":
    main()
