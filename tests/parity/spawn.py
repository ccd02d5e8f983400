"""Real gloo ranks: one process a rank, one deadline for all, and a failing rank's own words."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_ranks(script: Path, size: int, folder: Path, payload: Any, *, deadline_s: float) -> None:
    """Run `script FOLDER` as ranks 0..size-1, with `payload` in FOLDER/payload.json.

    The first rank that fails, or the deadline, ends all of them; the test fails with the logs' last lines.
    """
    folder.mkdir(parents=True)
    (folder / "payload.json").write_text(json.dumps(payload))
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(size):
        with (folder / f"rank{rank}.log").open("w") as log:
            env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "OMP_NUM_THREADS": "1"}
            env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(script.parent)])
            command = [sys.executable, str(script), str(folder)]
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT))
    end = time.monotonic() + deadline_s
    try:
        while any(p.poll() is None for p in ranks) and not any(p.poll() for p in ranks) and time.monotonic() < end:
            time.sleep(0.05)
        late = [i for i, p in enumerate(ranks) if p.poll() is None]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    failed = [i for i, p in enumerate(ranks) if p.returncode]
    if failed:
        tails = "\n".join(f"--- rank {i}\n{(folder / f'rank{i}.log').read_text()[-3000:]}" for i in failed)
        what = f"{script.name}: ranks {failed} failed (still running then: {late}; limit {deadline_s} s)"
        raise AssertionError(f"{what}\n{tails}")
