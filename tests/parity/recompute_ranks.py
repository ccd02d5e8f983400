"""Ranks of test_recompute.py: a step, its full gradients, and the bytes saved for backward.

They also count the layers whose input is still in memory after the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import gradient, make_batch, make_config, make_plan, make_vectors
from parity_ranks import weights
from rank_main import build_backend, main
from saved_bytes import SavedBytes
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef


def watch_inputs(layers: list[nn.Module]) -> list[StorageWeakRef]:
    """The storages of the layers' inputs in passes with gradients, filled in as they run."""
    seen: list[StorageWeakRef] = []

    def note(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            hidden = args[0] if args else kwargs["hidden_states"]
            seen.append(StorageWeakRef(hidden.untyped_storage()))

    for layer in layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    return seen


def run(case: dict[str, Any], folder: Path) -> None:
    config = make_config(case, folder.parent / "models")
    config.policy.routing_replay = case.get("replay", "none")
    backend = build_backend(config)
    root = backend.rank == 0
    batch = make_batch() if root else None
    backend.load_batch(batch, [make_plan(case["plan"])] if root else None)
    backend.score("policy")
    backend.assign(make_vectors(batch.num_trainable) if batch is not None else None)
    before = weights(backend, backend.policy, "lm")
    inputs = watch_inputs(
        [layer for chunk in backend.policy.chunks for layer in chunk.decoder.layers]
    )
    with SavedBytes(p for chunk in backend.policy.chunks for p in chunk.parameters()) as saved:
        update = backend.update(0)
    kept = sum(not storage.expired() for storage in inputs)
    after = weights(backend, backend.policy, "lm")
    counts: list[Any] = [None] * backend.world_size
    dist.all_gather_object(counts, (saved.peak, len(inputs), kept))
    peaks, seen, kept_inputs = zip(*counts)
    backend.close()
    if root:
        gradients = {name: gradient(before[name], after[name]) for name in before}
        result = {
            "metrics": update.metrics,
            "gradients": gradients,
            "saved_bytes": peaks,
            "inputs": seen,
            "kept_inputs": kept_inputs,
        }
        torch.save(result, folder / f"{case['name']}.pt")


if __name__ == "__main__":
    main(run)
