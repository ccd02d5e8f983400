"""A rank of test_planning.py: build the backend, take a step, and count bytes of storages."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import TRAINED, make_config
from rank_main import build_backend, joined, payload
from saved_bytes import SavedBytes
from torch import Tensor

from rlcore.data.batch import RolloutBatch
from rlcore.data.packing.plan import MinibatchPlan


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def make_batch(case: dict[str, Any]) -> tuple[RolloutBatch, MinibatchPlan]:
    """Packs of one sequence each, so that nothing is padded; the last half of each is trainable."""
    n = case["tokens"]
    packs = case["micro_batches"]
    ranks = case.get("data", 1)
    count = packs * ranks
    mask = (torch.arange(n) >= n - case["trainable"]).repeat(count)
    tokens = torch.randint(
        0, 500, (n * count,), generator=torch.Generator().manual_seed(0), dtype=torch.int32
    )
    vectors = {"rewards": torch.zeros(count), "group_ids": torch.arange(count)}
    batch = RolloutBatch(tokens, torch.arange(count + 1) * n, mask, vectors)
    return batch, MinibatchPlan(
        tuple(tuple((d * packs + k,) for k in range(packs)) for d in range(ranks))
    )


def run(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    optimizer = {**TRAINED, "offload": case.get("offload_optimizer", False)}
    config = make_config({**case, "optimizer": optimizer}, folder.parent / "models")
    backend = build_backend(config)
    root = backend.rank == 0
    batch, plan = make_batch(case)
    backend.load_batch(batch if root else None, [plan] if root else None)
    vectors = {
        name: torch.randn(batch.num_trainable)
        for name in ("advantages", "old_logprobs", "ref_logprobs")
    }
    backend.assign({**vectors, "weights": torch.ones(batch.num_trainable)} if root else None)
    parameters = [p for chunk in backend.policy.chunks for p in chunk.parameters()]
    with SavedBytes(parameters) as saved:
        backend.update(0)
    optimizer = backend.policy.optimizer
    assert optimizer is not None
    result: dict[str, Any] = {
        "groups": backend.connect() if dist.is_initialized() else {},
        "parameters": num_bytes(parameters),
        "gradients": num_bytes(backend.policy._gradients()),
        "activations": saved.peak,
    }
    on_device = num_bytes(t for t in optimizer._own_tensors() if t.dim())
    with optimizer.state.on_device():
        result["optimizer"] = num_bytes(t for t in optimizer._own_tensors() if t.dim())
    assert on_device == (0 if config.policy.optimizer.offload else result["optimizer"])
    backend.close()
    return result


def main() -> None:
    folder = Path(sys.argv[1])
    results = {}
    with joined(folder):
        for case in payload(folder):
            print("case", case["name"], flush=True)
            results[case["name"]] = run(case, folder)
    (folder / f"bytes{os.environ['RANK']}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
