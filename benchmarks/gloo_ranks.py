"""Runs a worker as ranks on this machine's CPU, with a deadline for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_S = 1800.0


def run_ranks(worker: Path, folder: Path, count: int) -> None:
    """Run `worker FOLDER` as ranks 0 to count - 1, with one thread each.

    Raises:
        TimeoutError, RuntimeError: the ranks did not end in time, or one of them failed.
    """
    ranks = []
    for rank in range(count):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(count),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",  # Megatron's, of what it does without Transformer Engine
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
        }
        ranks.append(subprocess.Popen([sys.executable, worker, folder], env=environment))
    end = time.monotonic() + DEADLINE_S
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > end:
                raise TimeoutError(f"the ranks did not end within {DEADLINE_S:.0f} s")
            time.sleep(0.1)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError(
            f"the ranks ended with {[rank.returncode for rank in ranks]}; what they printed stands"
            " above"
        )
