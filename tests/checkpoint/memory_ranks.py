"""A rank of test_checkpoint_memory.py: save and load, counting the bytes that torch allocates."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from checkpoint_case import Trained

from backends.megatron.cpu.shim import importing_megatron, megatron_device

with importing_megatron():
    from backends.megatron.checkpoint.save_load import (
        load_checkpoint,
        save_checkpoint,
        start_checkpoint,
    )
    from backends.megatron.checkpoint.shards import HostCopies
    from backends.megatron.parallel.state import init_parallel
from rlcore.config.sections.policy import ParallelConfig
from tests.parity.rank_main import joined, payload
from tests.peak_bytes import peak_bytes

VARIANT: dict[str, Any] = {"dtype": "bf16", "distributed": True}


def run(given: dict[str, Any]) -> None:
    root = Path(given["root"])
    layout = ParallelConfig()
    with megatron_device("cpu"):
        parallel = init_parallel(layout, timeout_s=60, seed=0)
        source = Path(given["source"])
        model = Trained("policy", source, VARIANT, layout, parallel)
        model.step(0)
        models = [model.saved]
        peaks = {"save": peak_bytes(lambda: save_checkpoint(root / "saved", models, parallel))}
        pending: list[Any] = []

        def start() -> None:
            host = HostCopies()
            pending.append(start_checkpoint(root / "started", models, parallel, host))

        peaks["start"] = peak_bytes(start)
        while pending[0].written() is None:
            pass
        fresh = Trained("policy", source, VARIANT, layout, parallel)
        peaks["load"] = peak_bytes(lambda: load_checkpoint(root / "saved", [fresh.saved], parallel))
        chunk = model.saved.chunks[0]
        parameters = list(chunk.parameters())
        numbers = {"peaks": peaks, "parameters": sum(p.numel() for p in parameters)}
        (root / f"numbers{parallel.rank}.json").write_text(json.dumps(numbers))


if __name__ == "__main__":
    with joined(Path(sys.argv[1]), alone=True):
        run(payload(Path(sys.argv[1])))
