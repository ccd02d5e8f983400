"""A rank of test_plan_beside_a_run.py: publish and save, and count the bytes of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cases import TRAINED, make_config
from rank_main import build_backend, main


def run(case: dict[str, Any], folder: Path) -> None:
    optimizer = {**TRAINED, "distributed": case.get("distributed", False)}
    config = make_config({**case, "optimizer": optimizer}, folder.parent / "models")
    backend = build_backend(config)
    found: dict[str, Any] = {}
    for name, everywhere in (("alone", False), ("everywhere", True)):
        exporter = backend._exports.published.exporter
        exporter.free_buffers()
        sizes = [
            0 if flat is None else flat.nbytes
            for _, flat in backend.export_buckets(everywhere=everywhere)
        ]
        found[name] = {
            "sent": sizes,
            "buffers": sum(buffer.nbytes for buffer in exporter._buffers.values()),
        }
    optimizer = backend.policy.optimizer
    assert optimizer is not None
    optimizer.prepare_for_load()  # moments, which AdamW has from its first step on
    optimizer.set_steps_taken(1)
    target = folder / case["name"]
    backend.save(target)
    found["on_disk"] = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    backend.close()
    (folder / f"{case['name']}{backend.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(run)
