"""A rank of test_offloaded_trainer.py: train with and without offloads in between, and compare."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
from cases import TRAINED, make_batch, make_config, make_plan, make_vectors
from offload_ranks import check_same_files, states
from rank_main import build_backend, main
from torch import Tensor
from torch.nn import Parameter

from backends.megatron import MegatronBackend
from backends.megatron.training.passes import SwappedIn

SMALL = 64 << 10  # bytes that may stay: rotary tables, masks, counters

Scores = list[dict[str, Tensor] | None]


def build(case: dict[str, Any], folder: Path) -> MegatronBackend:
    config = make_config({**case, "optimizer": TRAINED}, folder.parent / "models")
    config.policy.optimizer.offload = config.critic.offload = case.get("offload_trained", False)
    return build_backend(config, reference=True, critic=True)


def device_bytes(backend: MegatronBackend | None = None) -> int:
    """The bytes of every storage of this process but the host memory that `backend` offloads to."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if type(o) in (Tensor, Parameter)]
    everything = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    if backend is not None:
        hosts = [host for offloaded in backend._offloadable for host in offloaded._hosts.values()]
        hosts += backend._host_copies._tensors.values()
        for frozen in backend.frozen.values():
            if isinstance(frozen, SwappedIn):
                hosts += [*frozen._weights, *frozen._aside]
        for host in hosts:
            everything.pop(host.untyped_storage()._cdata, None)
    return sum(everything.values())


def offloaded_bytes(backend: MegatronBackend) -> int:
    """Bytes of the backend's models that are off the device."""
    return sum(offloaded.num_bytes for offloaded in backend._offloadable)


def take_step(backend: MegatronBackend, plan: str) -> Scores:
    """Take a training step with a batch."""
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


def offload(backend: MegatronBackend, before: int) -> None:
    """Offload: nothing of the trainer plain on the device, and the models' bytes are counted."""
    used = device_bytes(backend) - before
    backend.offload()
    left = device_bytes(backend) - before
    assert left < SMALL, f"{left} of {used} bytes stayed on the device"
    assert offloaded_bytes(backend) > used // 2, (offloaded_bytes(backend), used)
    for model in backend._own_models:
        for chunk in model.chunks:
            for module in chunk.modules():
                if (dispatcher := getattr(module, "token_dispatcher", None)) is not None:
                    kept = (getattr(dispatcher, name, None) for name in ("probs", "routing_map"))
                    assert [*kept] == [None, None]


def run(case: dict[str, Any], folder: Path) -> None:
    plain = build(case, folder)
    expected = [take_step(plain, case["plan"]), take_step(plain, case["plan"])]
    weights = published(plain)
    after_two = states(plain)
    plain.save(folder / f"{case['name']}_plain")
    third = take_step(plain, case["plan"])
    after_three = states(plain)
    plain.close()
    del plain

    before = device_bytes()
    offloaded = build(case, folder)
    results = []
    for _ in range(2):
        offload(offloaded, before)
        offloaded.offload()  # twice is once
        offloaded.onload()
        offloaded.onload()
        assert offloaded_bytes(offloaded) == 0 or case.get("offload_trained")
        results.append(take_step(offloaded, case["plan"]))
        published(offloaded)
    offload(offloaded, before)
    # each pass loads its tensors and offloads them again
    check_same("the published weights", published(offloaded), weights)
    check_same("weights and optimizers", states(offloaded), after_two)
    offloaded.save(folder / f"{case['name']}_offloaded")
    check_same_files(folder / f"{case['name']}_offloaded", folder / f"{case['name']}_plain")
    offload(offloaded, before)  # the buffers of those passes too
    offloaded.close()
    del offloaded

    resumed = build(case, folder)
    offload(resumed, before)  # before its optimizers have any state
    resumed.load(folder / f"{case['name']}_plain")
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
