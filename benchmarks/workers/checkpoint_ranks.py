"""A rank of checkpoints.py: it saves and loads, and writes RANK.json with bytes and seconds."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from backends.megatron.backend import MegatronBackend
from rlcore.algorithms import PolicyLoss
from rlcore.config.load import load_config
from rlcore.runs.directory import RunDirectory

PIECE = 8 << 20  # bytes of a raw write


def no_objective(inputs: Any) -> PolicyLoss:
    raise AssertionError("nothing is trained here")


def build(model: Path, settings: dict[str, Any]) -> MegatronBackend:
    """Build a policy of random weights with AdamW's moments, as after its first step."""
    given = {"run.name": "bench", "model.path": model, "training.steps": 1, **settings}
    keys = [f"{key}={value}" for key, value in given.items()]
    loaded = load_config([], [*keys, "data.paths=[none]", "algorithm.loss.name=sft"])
    backend = MegatronBackend(
        loaded.config,
        no_objective,
        with_reference=False,
        with_critic=False,
        total_steps=1,
        device="cpu",
    )
    optimizer = backend.policy.optimizer
    assert optimizer is not None
    optimizer.prepare_for_load()  # the moments, without a training pass
    optimizer.steps_taken = 1
    return backend


def measured(work: Callable[[], None]) -> dict[str, float]:
    """Measure a collective: seconds, and by how much it raised this process's resident memory."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before = _resident("VmRSS")
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "peak": _resident("VmHWM") - before}


def _resident(name: str) -> int:
    [line] = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(f"{name}:")
    ]
    return int(line.split()[1]) << 10


def read_bytes() -> int:
    """Return the bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def write_raw(path: Path, size: int) -> None:
    piece = os.urandom(PIECE)
    with open(path, "wb") as file:
        for start in range(0, size, PIECE):
            file.write(piece[: size - start])
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    payload = json.loads((folder / "payload.json").read_text())
    backend = build(Path(payload["model"]), payload["settings"])
    if rank == 0:  # for `rlcore export`
        RunDirectory(folder).write_config(backend.config.model_dump(mode="json"), {})
    saved = folder / "saved"
    found: dict[str, Any] = {"save": measured(lambda: backend.save(saved))}
    own = [path for path in saved.rglob("*.distcp") if path.name.startswith(f"__{rank}_")]
    found["written"] = sum(path.stat().st_size for path in own)
    before = read_bytes()
    found["load"] = measured(lambda: backend.load(saved))
    found["read"] = read_bytes() - before
    found["raw"] = measured(lambda: write_raw(folder / f"raw{rank}", found["written"]))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    backend.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
