"""What each rank of test_planning.py does: build with the real backend, take a step, count bytes of unique storages."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import TRAINED, make_config
from torch import Tensor

from backends.megatron import MegatronBackend
from rlcore.data.batch import RolloutBatch
from rlcore.data.packing import MinibatchPlan
from rlcore.objective import Objective


class SavedBytes:
    """While open, the most bytes that autograd held at once for backward passes, in storages that are not in `apart`."""

    def __init__(self, apart: Iterable[Tensor]) -> None:
        self.apart = {t.untyped_storage()._cdata for t in apart}
        self.holders: Counter[int] = Counter()
        self.now = self.peak = 0
        self.hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: _Held(t, self), lambda held: held.tensor)

    def __enter__(self) -> SavedBytes:
        self.hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.hooks.__exit__(*exception)


class _Held:
    def __init__(self, tensor: Tensor, book: SavedBytes) -> None:
        self.tensor, self.book = tensor, book
        storage = tensor.untyped_storage()
        self.key, self.size = storage._cdata, storage.nbytes()
        if self.key not in book.apart:
            book.now += self.size * (book.holders[self.key] == 0)
            book.holders[self.key] += 1
            book.peak = max(book.peak, book.now)

    def __del__(self) -> None:
        if self.key not in self.book.apart:
            self.book.holders[self.key] -= 1
            self.book.now -= self.size * (self.book.holders[self.key] == 0)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def make_batch(case: dict[str, Any]) -> tuple[RolloutBatch, MinibatchPlan]:
    """Packs of one sequence each, so that nothing is padded; the last half of each is trainable."""
    n, packs, ranks = case["tokens"], case["micro_batches"], case.get("data", 1)
    count = packs * ranks
    mask = (torch.arange(n) >= n - case["trainable"]).repeat(count)
    tokens = torch.randint(0, 500, (n * count,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    vectors = {"rewards": torch.zeros(count), "group_ids": torch.arange(count)}
    batch = RolloutBatch(tokens, torch.arange(count + 1) * n, mask, vectors)
    return batch, MinibatchPlan(tuple(tuple((d * packs + k,) for k in range(packs)) for d in range(ranks)))


def run(case: dict[str, Any], folder: Path) -> dict[str, int]:
    config = make_config({**case, "optimizer": TRAINED}, folder.parent / "models")
    backend = MegatronBackend(
        config, Objective(config.algorithm), with_reference=False, with_critic=False, total_steps=10, device="cpu"
    )
    root = backend.rank == 0
    batch, plan = make_batch(case)
    backend.load_batch(batch if root else None, [plan] if root else None)
    vectors = {name: torch.randn(batch.num_trainable) for name in ("advantages", "old_logprobs", "ref_logprobs")}
    backend.assign({**vectors, "weights": torch.ones(batch.num_trainable)} if root else None)
    parameters = [p for chunk in backend.policy.chunks for p in chunk.parameters()]
    with SavedBytes(parameters) as saved:
        backend.update(0)
    optimizer = backend.policy.optimizer
    assert optimizer is not None
    result = {
        "parameters": num_bytes(parameters),
        "gradients": num_bytes(backend.policy._gradients()),
        "optimizer": num_bytes(t for t in optimizer._own_tensors() if t.dim()),
        "activations": saved.peak,
    }
    backend.close()
    return result


def main() -> None:
    torch.set_num_threads(1)
    folder, size, rank = Path(sys.argv[1]), int(os.environ["WORLD_SIZE"]), os.environ["RANK"]
    if size > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=int(rank), world_size=size, timeout=timedelta(seconds=60)
        )
    results = {}
    for case in json.loads((folder / "payload.json").read_text()):
        print("case", case["name"], flush=True)
        results[case["name"]] = run(case, folder)
    (folder / f"bytes{rank}.json").write_text(json.dumps(results))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
