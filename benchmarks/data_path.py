"""What a token of a step costs rank 0: seconds and memory of its way to the ranks and back.

    python benchmarks/data_path.py                    4,096 samples of 8,000 tokens, 32 data ranks
    python benchmarks/data_path.py --samples 512      less memory (the default needs 8 GB)

Rank 0 makes the batch of the samples, deals it to the data-parallel ranks, takes the log-probs and
entropies of every rank, hands advantages and weights out, and records the step to a file. All of
it is the product's code; the wire is not there: what would be sent is made, and dropped. The plan
is given; the estimator is in benchmarks/algorithms.py.

Memory is what the process holds at most beyond the samples, by the kernel's own count.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from report import machine

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.batch import local_batch

from rlcore.data.batch import RolloutBatch
from rlcore.data.packing.plan import MinibatchPlan
from rlcore.data.sample import Sample, VersionSpan
from rlcore.launch.service.frames import encode, receive, send
from rlcore.runs.recorder import each
from rlcore.runs.rollouts import write_rollouts

PROMPT = 1000  # tokens
REPEATS = 3


def samples_of(count: int, length: int) -> list[Sample]:
    """Samples as a service has them, each with its own arrays."""
    rng = np.random.default_rng(0)
    made = []
    for row in range(count):
        mask = np.ones(length, dtype=np.uint8)
        mask[:PROMPT] = 0
        m = length - PROMPT
        made.append(
            Sample(
                draw=row // 16,
                index=row % 16,
                prompt_id=f"prompt:{row // 16}",
                group_id=row // 16,
                rollout_id=row,
                tokens=np.minimum(rng.zipf(1.3, length), 150_000).astype(np.int32),
                loss_mask=mask,
                rollout_logprobs=-rng.gamma(0.3, size=m).astype(np.float32),
                versions=(VersionSpan(7, 0, m // 2), VersionSpan(8, m // 2, m)),
                finish_reason="stop",
                reward=float(row % 2),
            )
        )
    return made


def plan_of(count: int, ranks: int) -> list[MinibatchPlan]:
    """A plan that deals the samples out in turn, a micro-batch a sample."""
    return [MinibatchPlan(tuple(tuple((i,) for i in range(d, count, ranks)) for d in range(ranks)))]


def handed_over(frame: list[bytes | memoryview]) -> list[Sample]:
    """Read samples from a socket, as rank 0 reads those of the service's process."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:
        sending = pool.submit(send, theirs, frame)
        received: list[Sample] = receive(ours)
        sending.result()
    return received


def batch_of(samples: list[Sample]) -> RolloutBatch:
    """The batch, as rank 0 makes it."""
    batch = RolloutBatch.from_samples(samples)
    batch.lend_arrays(samples)
    return batch


class FakeParallel:
    """Rank 0 of a world where every data-parallel rank is a process."""

    def __init__(self, ranks: int) -> None:
        self.rank = self.dp_rank = 0
        self.world_size = self.dp_size = ranks
        self.replica_leaders = self.score_sources = list(range(ranks))
        self.control_group = None
        self.replica_group = mock.Mock(size=lambda: 1)
        self.is_last_stage = True


class Measured:
    """Seconds and most memory of the stages, as the kernel counts pages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self._before = _kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is what there is now

    def stage(self, name: str, work: Callable[[], Any]) -> Any:
        """Run and time a stage."""
        start = time.perf_counter()
        found = work()
        self.seconds[name] = time.perf_counter() - start
        return found

    @property
    def most_bytes(self) -> int:
        """The most memory since this was made, beyond what there was then."""
        return (_kib("VmHWM") - self._before) << 10


def _kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise ValueError(f"the kernel does not tell {name}")


def a_step(samples: list[Sample], ranks: int, folder: Path) -> Measured:
    """Take one step's batch through rank 0."""
    plans = plan_of(len(samples), ranks)
    parallel: Any = FakeParallel(ranks)
    measured = Measured()
    sent = {"send": lambda data, *_, **__: None, "broadcast": lambda *_, **__: None}
    with (
        mock.patch.multiple(local_batch.dist, **sent),
        mock.patch.object(local_batch, "broadcast_json", lambda value, *_: value),
    ):
        batch = measured.stage("batch of the samples", lambda: batch_of(samples))
        local = measured.stage(
            "deal it to the ranks",
            lambda: local_batch.LocalBatch(
                batch, plans, parallel, torch.device("cpu"), pad_multiple=1
            ),
        )
        own = torch.zeros(2, local.batch.num_trainable)

        def gather(_: Any, sizes: Any, __: Any) -> list[torch.Tensor]:
            return [own.expand(size).contiguous() for size in sizes]

        with mock.patch.object(local_batch, "_gather", gather):
            scores = measured.stage(
                "take log-probs and entropies", lambda: local.collect([*own], 2)
            )
        for name, value in zip(("logprobs", "entropy"), scores):
            batch.set(name, value)
        advantages = torch.ones(batch.num_trainable)
        weights = torch.ones(batch.num_trainable)
        credit = {"advantages": advantages, "weights": weights}
        measured.stage("hand advantages and weights out", lambda: local.assign(credit))
        batch.vectors |= credit
    vectors = {name: each(batch, name) for name in ("logprobs", "entropy", "weights")}
    measured.stage(
        "record (in the background)",
        lambda: write_rollouts(
            folder / "step_000001.parquet", 1, samples, each(batch, "advantages"), vectors=vectors
        ),
    )
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--length", type=int, default=8000)
    parser.add_argument("--ranks", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    frame = encode(samples_of(given.samples, given.length))
    tokens = given.samples * given.length
    with tempfile.TemporaryDirectory() as folder:
        runs = [a_step(handed_over(frame), given.ranks, Path(folder)) for _ in range(REPEATS)]
        recorded = (Path(folder) / "step_000001.parquet").stat().st_size
    best = {name: min(run.seconds[name] for run in runs) for name in runs[0].seconds}
    told: dict[str, Any] = {"machine": machine(), "tokens": tokens, "ranks": given.ranks}
    told |= {f"{name} (ns a token)": round(s / tokens * 1e9, 1) for name, s in best.items()}
    told["memory beyond the samples (bytes a token)"] = round(
        min(run.most_bytes for run in runs) / tokens, 1
    )
    told["recording (bytes a token)"] = round(recorded / tokens, 1)
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
