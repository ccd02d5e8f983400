"""What control costs by the number of ranks: all that is neither generation nor training.

    python benchmarks/control.py                   # 16, 64 and 128 ranks, 16 engines of TP 8
    python benchmarks/control.py --ranks 16 --steps 2

Ranks are threads, at most 32 in a process, and rank 0 has one of its own: the others would take its
interpreter's lock. Each runs a real run to its end over a real TCPStore, with the real rollout
service; there is no model, and nothing is trained or sent (workers/control_ranks.py). The engines
are HTTP servers that answer at once. The buckets are those of a model of 235B parameters, and so
is the plan of its exporter, for layouts of the recipe's kind.

Requests are of all ranks and of the store behind `RankSync`: `written` and `read` are the same in
each step, and `looks` are made as long as something takes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import nn

from backends.megatron.convert.read import read_architecture
from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.convert.architecture import Architecture, model_entries
    from backends.megatron.convert.layout import weight_specs
    from backends.megatron.dryrun.stubs import Peers
    from backends.megatron.weights import export
    from backends.megatron.weights.export import WeightExporter
    from backends.megatron.weights.tensors import Exported

from benchmarks.publish_scale import MODELS, write_config
from rlcore.config.sections.policy import ParallelConfig
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rollout.weight_sync.process_group import own_address

WORKERS = Path(__file__).with_name("workers")
ROOT = Path(__file__).resolve().parents[1]
RANKS_A_PROCESS = 32
LIMIT_S = 1800.0
TENSOR_PARALLEL = 8
NODE = 8  # ranks
ELSEWHERE = "http://192.0.2.1:1"  # an address of no machine
PROCESSES = ("rank0", "service")
WARM = 2  # steps that open groups and connections


@dataclass(frozen=True)
class Control:
    """A run of `ranks` ranks. Seconds and requests are medians of its steps."""

    ranks: int
    # From update to update, without generation; of these, the publication, and its opening.
    step_s: float
    publication_s: float
    opening_s: float
    first_opening_s: float
    # By rank 0, after a long and a short wait: to the median rank, and to the last one.
    broadcast_s: dict[str, tuple[float, float]]
    # Requests of all ranks in a step, and bytes of values.
    requests: dict[str, float]
    # Of a step, by process.
    cpu_s: dict[str, float]
    # At the last step, by process.
    megabytes: dict[str, float]


def measure(
    folder: Path,
    ranks: int,
    *,
    engines: int = 16,
    steps: int = 5,
    model: str = "235B",
    smaller: Mapping[str, int] | None = None,
    bucket_bytes: int = 1 << 30,
) -> Control:
    """Run `ranks` ranks in an empty folder, which is left with logs.

    Args:
        smaller: values that replace those of the model's configuration.
        steps: after the first two, which are not counted.
    """
    init_model(folder / "model", ModelSpec(hidden=32, layers=1, heads=2, kv_heads=1))
    rows = [{"prompt": str(n), "label": str(n)} for n in range(64)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    limit = timedelta(seconds=LIMIT_S)
    with engine_stubs(folder, engines) as urls:
        (folder / "run.yaml").write_text(json.dumps(run_config(folder, urls, WARM + steps)))
        stores = [
            dist.TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False)
            for _ in range(2)
        ]
        settings = {
            "world": ranks,
            "store": stores[0].port,
            "collectives": stores[1].port,
            "model": model,
            "smaller": dict(smaller or {}),
            "bucket_bytes": bucket_bytes,
        }
        (folder / "settings.json").write_text(json.dumps(settings))
        run_processes(folder, ranks)
    return result(folder, ranks)


def run_config(folder: Path, urls: Sequence[str], steps: int) -> dict[str, Any]:
    """A run whose engines answer with eight tokens."""
    engine = {
        "kind": "sglang",
        "urls": list(urls),
        "tensor_parallel": TENSOR_PARALLEL,
        # Nobody may be lost on a busy machine.
        "health_timeout_s": LIMIT_S,
        "update_timeout_s": LIMIT_S,
    }
    return {
        "run": {"name": "control", "dir": str(folder / "runs"), "threads": 1},
        "model": {"path": str(folder / "model"), "dtype": "fp32"},
        "data": {
            "paths": [str(folder / "data.jsonl")],
            "prompt_key": "prompt",
            "label_key": "label",
        },
        "algorithm": {"estimator": {"name": "grpo"}},
        "rollout": {
            "prompts_per_step": 8,
            "samples_per_prompt": 4,
            "sampling": {"max_new_tokens": 8},
            "engine": engine,
        },
        "reward": {"parts": {"right": {"function": "exact_match"}}},
        "training": {"steps": steps},
        "checkpoint": {"every": 0, "export_hf": False},
        "cluster": {"heartbeat_timeout_s": LIMIT_S},
    }


@contextmanager
def engine_stubs(folder: Path, count: int) -> Iterator[list[str]]:
    """Start servers at this machine's address, as ranks of other machines would reach them."""
    address = own_address(ELSEWHERE)
    command = [
        *(sys.executable, WORKERS / "engine_stubs.py"),
        *(folder / "model", address, count, TENSOR_PARALLEL),
    ]
    servers = subprocess.Popen(
        list(map(str, command)), stdin=-1, stdout=-1, text=True, env=environment()
    )
    try:
        assert servers.stdout is not None
        yield [f"http://{address}:{port}" for port in servers.stdout.readline().split()]
    finally:
        servers.communicate(timeout=60)


def environment() -> dict[str, str]:
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    # torch looks up the name of each address that a store connects to, and many lookups at once may
    # each wait for a name server that drops them.
    quiet["RES_OPTIONS"] = "timeout:1 attempts:1"
    return {**os.environ, **quiet, "PYTHONPATH": str(ROOT)}


def run_processes(folder: Path, ranks: int) -> None:
    """Run the ranks. Raises RuntimeError, TimeoutError with the end of a log."""
    parts = [(0, 1)]
    count = -(-(ranks - 1) // RANKS_A_PROCESS)
    cuts = [1 + (ranks - 1) * part // count for part in range(count + 1)]
    parts += pairwise(cuts)
    processes = []
    logs = [folder / f"ranks_{first}.log" for first, _ in parts]
    for (first, end), log in zip(parts, logs):
        command = [sys.executable, str(WORKERS / "control_ranks.py"), str(folder)]
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(
                    [*command, str(first), str(end)],
                    stdout=output,
                    stderr=output,
                    env=environment(),
                )
            )
    deadline = time.monotonic() + LIMIT_S
    try:
        while any(one.poll() is None for one in processes):
            if any(one.poll() for one in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        codes = [one.poll() for one in processes]
    finally:
        for one in processes:
            one.kill()
            one.wait()
    for code, log in zip(codes, logs):
        if code:
            raise RuntimeError(f"{log.name}: exit code {code}: {log.read_text()[-3000:]}")
    if None in codes:
        raise TimeoutError(f"the ranks did not end within {LIMIT_S:g} s: see {folder}")


def result(folder: Path, ranks: int) -> Control:
    """Read what the ranks have written."""
    found = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
    rows = [
        json.loads(line)
        for line in (folder / "runs" / "control" / "metrics.jsonl").read_text().splitlines()
    ]
    updates = found[0]["updates"]
    steps = range(WARM, len(updates))
    # What follows an update is in the row of its step, and generation in that of the next.
    step_s = [updates[n]["at"] - updates[n - 1]["at"] - rows[n]["time/generation"] for n in steps]

    def of_a_step(rank: Mapping[str, Any], kind: str, step: int) -> float:
        return float(rank["updates"][step][kind] - rank["updates"][step - 1][kind])

    requests = {
        kind: statistics.median(sum(of_a_step(rank, kind, n) for rank in found) for n in steps)
        for kind in ("writes", "reads", "looks", "bytes")
    }
    opening = json.loads((folder / "opening.json").read_text())
    each = [sum(parts) for parts in zip(opening["order"], opening["open"], opening["join"])]
    half = len(found[0]["pings"]) // 2
    pings = {"long": slice(0, half), "short": slice(half, None)}

    def broadcast(part: slice) -> tuple[float, float]:
        by_ping = list(zip(*(rank["pings"][part] for rank in found[1:])))
        return statistics.median(chain(*by_ping)), statistics.median(map(max, by_ping))

    return Control(
        ranks,
        statistics.median(step_s),
        statistics.median(rows[n - 1]["time/publish"] for n in steps),
        statistics.median(each[1:]),
        each[0],
        {name: broadcast(part) for name, part in pings.items()},
        requests,
        {
            name: statistics.median(of_a_step(found[0], f"{name}_cpu_s", n) for n in steps)
            for name in PROCESSES
        },
        {name: updates[-1][f"{name}_bytes"] / 1e6 for name in PROCESSES},
    )


# --- the plan of an exporter ----------------------------------------------------------------------


def plan_seconds(ranks: int, model: str = "235B", bucket_bytes: int = 1 << 30) -> float:
    """CPU seconds in which a rank finds out who sends which part of which bucket, once a run."""
    with tempfile.TemporaryDirectory() as scratch:
        write_config(Path(scratch), *MODELS[model][:2])
        architecture = read_architecture(Path(scratch))
    layout = layout_of(ranks, architecture.num_layers)
    began = time.process_time()
    exporter = exporter_alone(architecture, layout, ranks, bucket_bytes)
    for bucket in exporter.buckets:
        exporter._root(bucket)
    return time.process_time() - began


def layout_of(ranks: int, layers: int) -> ParallelConfig:
    """The layout of the recipe for 235B on 128 ranks; fewer ranks have fewer stages."""
    stages = max(1, min(8, ranks // 16))
    last = layers - (stages - 1) * -(-layers // stages)
    return ParallelConfig(
        tensor=4,
        context=2,
        expert=8,
        expert_tensor=1,
        pipeline=stages,
        last_stage_layers=last if stages > 1 else None,
    )


def exporter_alone(
    architecture: Architecture, layout: ParallelConfig, ranks: int, bucket_bytes: int
) -> WeightExporter:
    """Rank 0's exporter, without weights; its peers' answers are those of a dry run."""
    peers = Peers(layout, ranks)
    state: Any = SimpleNamespace(
        rank=0,
        world_size=ranks,
        tp_size=layout.tensor,
        ep_size=layout.expert,
        etp_size=layout.expert_tensor,
    )

    def weights(
        chunks: Any, arch: Architecture, dtype: torch.dtype, *_: Any, **__: Any
    ) -> Exported:
        return Exported(model_entries(arch, "lm"), weight_specs(arch, dtype, "lm"), {}, {})

    answers = {
        "_gather_coordinates": lambda exporter: peers.of_exporter(),
        "_agree_on_vocab": lambda exporter, rows: peers.padded_vocab(exporter),
        "_find_sources": lambda exporter: peers.sources(exporter),
        "_make_group": lambda exporter: None,
    }
    with (
        mock.patch.object(export, "exported", weights),
        mock.patch.multiple(WeightExporter, **answers),
    ):
        return WeightExporter(
            [nn.Linear(1, 1)], architecture, state, dtype=torch.bfloat16, bucket_bytes=bucket_bytes
        )


# --- the table ------------------------------------------------------------------------------------

HEAD = (
    "ranks", "a step, s", "its publication, s", "opening: first, later, s", "plan, s",
    "broadcast after a long wait: median, last rank, ms", "after a short one",
    "CPU: rank 0, service, s", "MB", "written, read", "looks", "KB",
)  # fmt: skip


def row(found: Control, plan_s: float) -> list[str]:
    """A row of the table."""
    milliseconds = {
        name: ", ".join(f"{1e3 * value:.0f}" for value in values)
        for name, values in found.broadcast_s.items()
    }
    return [
        str(found.ranks),
        f"{found.step_s:.1f}",
        f"{found.publication_s:.1f}",
        f"{found.first_opening_s:.2f}, {found.opening_s:.2f}",
        f"{plan_s:.2f}",
        milliseconds["long"],
        milliseconds["short"],
        ", ".join(f"{found.cpu_s[name]:.1f}" for name in PROCESSES),
        ", ".join(f"{found.megabytes[name]:.0f}" for name in PROCESSES),
        f"{found.requests['writes']:.0f}, {found.requests['reads']:.0f}",
        f"{found.requests['looks']:.0f}",
        f"{found.requests['bytes'] / 1e3:.0f}",
    ]


def main() -> None:
    """Print a row for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 64, 128])
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |")
    print("|" + "---:|" * len(HEAD))
    for ranks in given.ranks:
        plan_s = plan_seconds(ranks)
        with tempfile.TemporaryDirectory() as folder:
            found = measure(Path(folder), ranks, engines=given.engines, steps=given.steps)
        print(f"| {' | '.join(row(found, plan_s))} |", flush=True)


if __name__ == "__main__":
    main()
