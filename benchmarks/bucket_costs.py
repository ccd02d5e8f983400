"""Measures what a bucket of weights costs beside its bytes: at an SGLang server, and on rank 0.

A tiny model is published to a real server on the CPU, which this starts, in buckets of few and of
many tensors; with the call of the next bucket ahead, and with one call after the other. The bytes
weigh nothing, so what is left is what `publish_scale.py` takes for a bucket, a tensor and a call.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "sglang"))

import server_kit
import torch
from publication_kit import Weights, connect, flatten, folder_weights, run_config, sink_over
from server_kit import Served

from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.engines.sglang.engine import SGLangEngine

LAYERS = 96


def cut(weights: Weights, tensors: int) -> tuple[Bucket, ...]:
    """Cut buckets of about so many tensors."""
    specs = [TensorSpec(name, tuple(w.shape), "float32") for name, w in weights.items()]
    size = sum(spec.num_bytes for spec in specs)
    return cut_buckets(specs, 1 if tensors == 1 else size * tensors // len(specs))


async def thread_seconds() -> float:
    """CPU seconds of the thread in which the calls are made."""
    return time.thread_time()


class Costs:
    """Publishes to one server. Times are seconds a bucket."""

    def __init__(self, served: Served, folder: Path) -> None:
        config = run_config(str(served.model), folder, served.config)
        self._served = served
        self._engine: SGLangEngine = connect(config, served.url, served.keys, served.loop)
        self._sink, _ = sink_over(config, [self._engine], served.loop)
        self._weights = folder_weights(served.model)
        self._version = 0

    def measure(self, tensors: int, *, ahead: bool) -> tuple[int, float, float]:
        """Return the buckets, and of one the seconds and the CPU seconds of the engines' loop."""
        self._engine.queues_buckets = ahead
        buckets = cut(self._weights, tensors)
        flats = [flatten(bucket, self._weights) for bucket in buckets]
        self._version += 1
        self._sink.prepare(buckets)
        busy = self._served.call(thread_seconds())
        began = time.perf_counter()
        for bucket, flat in zip(buckets, flats):
            self._sink.send(bucket, flat)
        seconds = time.perf_counter() - began
        busy = self._served.call(thread_seconds()) - busy
        self._sink.finish(self._version)
        return len(buckets), seconds / len(buckets), busy / len(buckets)

    def close(self) -> None:
        self._sink.close()
        self._served.call(self._engine.close())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tensors", type=int, nargs="+", default=[1, 8, 64])
    given = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        spec = ModelSpec(hidden=32, layers=LAYERS, heads=4, kv_heads=2, intermediate=64)
        init_model(folder / "model", spec)
        served = server_kit.launch(server_kit.managed(folder / "model", folder / "server.log"))
        costs = Costs(served, folder)
        try:
            print("| tensors a bucket | buckets | one call at once | two | the engines' loop |")
            print("|---|---:|---:|---:|---:|")
            for tensors in given.tensors:
                costs.measure(tensors, ahead=True)  # not counted: connections are made
                rounds = [
                    (costs.measure(tensors, ahead=False), costs.measure(tensors, ahead=True))
                    for _ in range(given.rounds)
                ]
                one, two, busy = (
                    1e3 * statistics.median(values)
                    for values in zip(*((a[1], b[1], b[2]) for a, b in rounds))
                )
                count = rounds[0][0][0]
                print(f"| {tensors} | {count} | {one:.2f} ms | {two:.2f} ms | {busy:.2f} ms |")
        finally:
            costs.close()
            server_kit.close(served)


if __name__ == "__main__":
    main()
