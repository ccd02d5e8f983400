"""Ranks of test_routing.py: a pass that records experts, and a step that replays them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import gradient, make_config, make_plan, make_vectors
from parity_ranks import read_batch, weights
from rank_main import build_backend, main
from torch import Tensor

from backends.megatron import MegatronBackend
from backends.megatron.convert.load import load_hf


class Used:
    """The experts that routers sent each micro-batch's tokens to, in the order of their calls."""

    def __init__(self, backend: MegatronBackend) -> None:
        self.maps: dict[int, list[Tensor]] = {}
        for chunk in backend.policy.chunks:
            for layer in chunk.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    calls = self.maps.setdefault(int(layer.layer_number), [])
                    layer.mlp.router.register_forward_hook(
                        lambda _, inputs, output, calls=calls: calls.append(output[1])
                    )

    def are(self, micro_batches: list[Any]) -> bool:
        """Whether each micro-batch was routed, as recorded, and as often in all layers."""
        recorded = {
            layer: [
                torch.zeros(len(micro.experts[layer]), calls[0].size(1), dtype=torch.bool).scatter(
                    1, micro.experts[layer].long(), True
                )
                for micro in micro_batches
            ]
            for layer, calls in self.maps.items()
        }
        return all(
            len(calls) >= len(micro_batches)
            and all(any(torch.equal(call, one) for one in recorded[layer]) for call in calls)
            and all(any(torch.equal(call, one) for call in calls) for one in recorded[layer])
            for layer, calls in self.maps.items()
        )


def run(case: dict[str, Any], folder: Path) -> None:
    models = folder.parent / "models"
    config = make_config(case, models)
    config.policy.routing_replay = case["replay"]
    backend = build_backend(config, reference=True)
    root = backend.rank == 0
    batch = read_batch(case, folder.parent) if root else None
    backend.load_batch(batch, [make_plan(name) for name in case["plans"]] if root else None)
    # must not be what is recorded, though it is swapped into the policy
    backend.score("reference")
    scores = [backend.score("policy")]
    if "then" in case:
        load_hf(backend.policy.chunks, backend.policy.arch, models / case["then"], backend.parallel)
        scores.append(backend.score("policy"))  # the first pass has recorded
    backend.assign(make_vectors(batch.num_trainable) if batch is not None else None)
    before = weights(backend, backend.policy, "lm")
    used = Used(backend)
    for k in range(len(case["plans"])):
        for calls in used.maps.values():
            calls.clear()
        update = backend.update(k)
    after = weights(backend, backend.policy, "lm")
    gradients = {name: gradient(before[name], after[name]) for name in before}
    result: dict[str, Any] = {"scores": scores, "metrics": update.metrics, "gradients": gradients}
    every: list[Any] = [None] * backend.world_size
    own = used.are(backend._batch.micro_batches(k)) if case["replay"] == "logprobs" else False
    dist.all_gather_object(every, (update.metrics, own))
    assert all(one[0] == every[0][0] for one in every), every
    result["as_recorded"] = all(one[1] for one in every)
    backend.close()
    if root:
        torch.save(result, folder / f"{case['name']}.pt")


if __name__ == "__main__":
    main(run)
