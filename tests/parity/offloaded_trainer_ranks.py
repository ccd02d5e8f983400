"""What each rank of test_offloaded_trainer.py does: train, offloaded in between, and compare with a
trainer that stays, bit for bit.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from cases import TRAINED, make_batch, make_config, make_plan, make_vectors
from offload_ranks import states
from rank_main import main
from torch import Tensor
from torch.nn import Parameter

from backends.megatron import MegatronBackend
from backends.megatron.frozen import SwappedIn
from rlcore.trainer.objective import Objective

SMALL = 64 << 10  # bytes that may stay: rotary tables, masks, counters

Scores = list[dict[str, Tensor] | None]


def build(case: dict[str, Any], folder: Path) -> MegatronBackend:
    config = make_config({**case, "optimizer": TRAINED}, folder.parent / "models")
    config.policy.optimizer.offload = config.critic.offload = case.get("offload_trained", False)
    return MegatronBackend(
        config,
        Objective(config.algorithm),
        with_reference=True,
        with_critic=True,
        total_steps=10,
        device="cpu",
    )


def device_bytes(backend: MegatronBackend | None = None) -> int:
    """Of every storage of this process but the host memory that `backend` parks in."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, Parameter)]
    everything = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    if backend is not None:
        hosts = [host for offloading in backend._parkings for host in offloading._hosts.values()]
        hosts += backend._host_copies._tensors.values()
        for frozen in backend.frozen.values():
            if isinstance(frozen, SwappedIn):
                hosts += [*frozen.weights._weights, *frozen.weights._aside]
        for host in hosts:
            everything.pop(host.untyped_storage()._cdata, None)
    return sum(everything.values())


def take_step(backend: MegatronBackend, plan: str) -> Scores:
    """Everything that a training step does with a batch."""
    batch = make_batch() if backend.rank == 0 else None
    backend.load_batch(batch, None if batch is None else [make_plan(plan)])
    scores: Scores = [backend.score(name) for name in ("policy", "reference", "critic")]  # type: ignore[arg-type]
    backend.assign(None if batch is None else make_vectors(batch.num_trainable))
    backend.update(0)
    return scores


def published(backend: MegatronBackend) -> list[Tensor]:
    return [flat.clone() for _, flat in backend.export_buckets() if flat is not None]


def check_same(what: str, offloaded: list[Tensor], stayed: list[Tensor]) -> None:
    assert len(offloaded) == len(stayed), what
    assert all(torch.equal(a, b) for a, b in zip(offloaded, stayed)), what


def check_files(folder: Path, other: Path) -> None:
    names = [
        path.relative_to(folder) for path in folder.rglob("*") if path.suffix in (".distcp", ".pt")
    ]
    assert names
    for name in names:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name


def offload(backend: MegatronBackend, before: int) -> None:
    """Nothing of the trainer stays on the device, and what left it is what the models hold."""
    held = device_bytes(backend) - before
    backend.offload()
    left = device_bytes(backend) - before
    assert left < SMALL, f"{left} of {held} bytes stayed on the device"
    assert backend.parked_bytes > held // 2, (backend.parked_bytes, held)


def run(case: dict[str, Any], folder: Path) -> None:
    stays = build(case, folder)
    expected = [take_step(stays, case["plan"]), take_step(stays, case["plan"])]
    weights = published(stays)
    after_two = states(stays)
    stays.save(folder / f"{case['name']}_stays")
    third = take_step(stays, case["plan"])
    after_three = states(stays)
    stays.close()
    del stays

    before = device_bytes()
    parks = build(case, folder)
    results = []
    for _ in range(2):
        offload(parks, before)
        parks.offload()  # twice is once
        parks.onload()
        parks.onload()
        assert parks.parked_bytes == 0 or case.get("offload_trained")
        results.append(take_step(parks, case["plan"]))
        published(parks)
    offload(parks, before)
    # what is needed comes, and goes again
    check_same("the published weights", published(parks), weights)
    check_same("weights and optimizers", states(parks), after_two)
    parks.save(folder / f"{case['name']}_parked")
    check_files(folder / f"{case['name']}_parked", folder / f"{case['name']}_stays")
    offload(parks, before)  # the buffers of those passes too
    parks.close()
    del parks

    resumed = build(case, folder)
    offload(resumed, before)  # before its optimizers have any state
    resumed.load(folder / f"{case['name']}_stays")
    resumed.onload()
    results.append(take_step(resumed, case["plan"]))
    check_same("the step after a resume", states(resumed), after_three)
    resumed.close()
    for scores, reference in zip(results, [*expected, third], strict=True):
        for got, wanted in zip(scores, reference, strict=True):
            if wanted is not None:
                assert got is not None
                assert all(torch.equal(got[name], wanted[name]) for name in wanted)


if __name__ == "__main__":
    main(run)
