"""Real gloo ranks for tests: a process a rank, one deadline, and the log of a failed rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from tests.interpreters import start

ROOT = Path(__file__).parents[2]


def run_world(
    script: Path,
    size: int,
    folder: Path,
    payload: Any,
    *,
    deadline_s: float = 240,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run `script` as ranks 0..size-1; each gets `payload` by `join_world`.

    `environment` is added to this process's own; `nccl_rules.ON` makes ranks keep NCCL's rules.
    Fails with the log of a rank that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "payload.json").write_text(json.dumps(payload))
    started = []
    for rank in range(size):
        variables = {
            **os.environ,
            **environment,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "OMP_NUM_THREADS": "1",
        }
        variables["PYTHONPATH"] = str(ROOT)
        started.append(start(script, [str(folder)], variables, folder / f"rank{rank}.log"))
    try:
        end = time.monotonic() + deadline_s
        for process in started:
            process.wait(timeout=max(0.1, end - time.monotonic()))
            if process.returncode:
                break
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in started:
            process.kill()
            process.wait()
    failed = [rank for rank, process in enumerate(started) if process.returncode]
    logs = "\n".join(
        f"--- rank {rank}\n{(folder / f'rank{rank}.log').read_text()[-4000:]}" for rank in failed
    )
    assert not failed, f"{script.name}: ranks {failed} failed or outlived {deadline_s} s\n{logs}"


def join_world() -> Any:
    """On a rank: join the process group; the payload."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return json.loads((folder / "payload.json").read_text())
