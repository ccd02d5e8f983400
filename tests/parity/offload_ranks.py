"""A rank of test_offload.py: train with and without offload, through a checkpoint, and compare."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cases import TRAINED, make_batch, make_config, make_plan, make_vectors
from rank_main import build_backend, main
from torch import Tensor

from backends.megatron import MegatronBackend
from backends.megatron.checkpoint import shards
from backends.megatron.training import optimizer
from backends.megatron.training.offload import OffloadedTensors
from backends.megatron.training.passes import Model

WRITE_S = 60.0
PIECE_BYTES = 1 << 14


def build(case: dict[str, Any], folder: Path, *, offload: bool) -> MegatronBackend:
    config = make_config({"model": "qwen3", "optimizer": TRAINED, **case}, folder.parent / "models")
    config.policy.optimizer.offload = config.critic.offload = offload
    for each in (config.policy.optimizer, config.critic.optimizer):
        each.grad_reduce_in_fp32 = not case.get("narrow")
    # A critic's head would be a dense parameter beside adapters of experts.
    backend = build_backend(config, critic="lora" not in case)
    if case.get("stock"):
        for model in backend._trained.values():
            assert model.optimizer is not None
            model.optimizer._in_bf16 = False
    batch = make_batch() if backend.rank == 0 else None
    backend.load_batch(batch, [make_plan(case["plan"])] if batch is not None else None)
    backend.assign(None if batch is None else make_vectors(batch.num_trainable))
    return backend


def state(model: Model) -> list[Tensor]:
    """Weights and optimizer state on this rank."""
    assert model.optimizer is not None
    with model.on_device(), model.optimizer.state.on_device():
        tensors = [p for chunk in model.chunks for p in chunk.parameters()]
        for part in model.optimizer.parts:
            for parameter in (p for group in part.param_groups for p in group["params"]):
                state = part.optimizer.state[parameter]
                tensors += [parameter, state["exp_avg"], state["exp_avg_sq"], state["step"]]
        return [t.detach().clone() for t in tensors]


def states(backend: MegatronBackend) -> list[Tensor]:
    return [tensor for model in backend._trained.values() for tensor in state(model)]


def check_offloaded(backend: MegatronBackend) -> None:
    """Between passes the critic and the state of both optimizers are off the device.

    Of gradients in bf16 no copies in fp32 are left.
    """
    for model in backend._trained.values():
        assert model.optimizer is not None
        if model.optimizer._in_bf16:
            masters = [p for part in model.optimizer.parts for p in part.get_parameters()]
            assert all(p.grad is None for p in masters)
            assert {g.dtype for g in model._gradients()} >= {torch.bfloat16}
    if (critic := backend.critic) is not None:
        sizes = [p.untyped_storage().nbytes() for of in critic.chunks for p in of.parameters()]
        assert set(sizes) == {0}
        assert {gradients.untyped_storage().nbytes() for gradients in critic._gradients()} == {0}
    for model in backend._trained.values():
        assert model.optimizer is not None
        own = list(model.optimizer._own_tensors())
        moments = [t for t in own if t.dim()]
        assert moments
        assert {t.untyped_storage().nbytes() for t in moments} == {0}
    assert all(
        p.untyped_storage().nbytes() for chunk in backend.policy.chunks for p in chunk.parameters()
    )


class StateOnDevice:
    """Inside `watch`, records how much of an optimizer's state has been on the device at once."""

    def __init__(self, model: Model) -> None:
        assert model.optimizer is not None
        self.optimizer = model.optimizer
        groups = [group for part in self.optimizer.parts for group in part.param_groups]
        self.parameters = [p for group in groups for p in group["params"]]
        self.most = 0

    def measure(self) -> None:
        states = [part.optimizer.state for part in self.optimizer.parts]
        found = [t for state in states for of in state.values() for t in of.values() if t.dim()]
        own = [
            t.untyped_storage()
            for t in (*self.parameters, *found)
            if t.untyped_storage()._cdata not in self.optimizer._model_storages
        ]
        self.most = max(self.most, sum(storage.nbytes() for storage in own))

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Fails unless a piece and no more of the state was on the device inside."""
        real = OffloadedTensors._send_away

        def send_away(tensors: OffloadedTensors, storages: Any) -> None:
            self.measure()
            real(tensors, storages)

        with patch.object(OffloadedTensors, "_send_away", send_away):
            yield
        largest = 12 * max(p.numel() for p in self.parameters)
        assert self.most <= max(PIECE_BYTES, largest), (self.most, largest)


@contextmanager
def writing_delayed() -> Iterator[None]:
    """A checkpoint in the background that is started inside is written after the context ends."""
    allowed = threading.Event()
    real = shards.PlannedShards.write

    def delayed(*args: Any) -> None:
        assert allowed.wait(WRITE_S)
        real(*args)

    with patch.object(shards.PlannedShards, "write", delayed):
        try:
            yield
        finally:
            allowed.set()


def finish_save(backend: MegatronBackend) -> None:
    deadline = time.monotonic() + WRITE_S
    while backend.save_seconds() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    dist.barrier()
    backend.finish_save()


def check_same_files(folder: Path, other: Path) -> None:
    names = [
        path.relative_to(folder) for path in folder.rglob("*") if path.suffix in (".distcp", ".pt")
    ]
    assert len(names) > dist.get_world_size()
    for name in names:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    for model in {name.parts[0] for name in names}:
        before, after = (dcp.FileSystemReader(of / model).read_metadata() for of in (folder, other))
        assert before.state_dict_metadata == after.state_dict_metadata
        assert before.storage_data == after.storage_data


def run(case: dict[str, Any], folder: Path) -> None:
    if case.get("narrow"):
        # Megatron's own step converts all gradients at once; its norm is summed otherwise.
        found = check(case, folder)
        stock = check({**case, "name": f"{case['name']}_stock", "stock": True}, folder)
        torch.testing.assert_close(found, stock, rtol=1e-5, atol=1e-9)
        return
    if not case.get("fused"):
        check(case, folder)
        return
    # what CUDA has: the same steps but for rounding, and the same bits whatever is offloaded
    expected = check(case, folder)
    with patch.object(optimizer, "uses_fused_adamw", lambda device: True):
        found = check({**case, "name": f"{case['name']}_kernel"}, folder)
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def check(case: dict[str, Any], folder: Path) -> list[Tensor]:
    """Check one case; returns the state after three steps."""
    with patch.object(optimizer, "OPTIMIZER_PIECE", PIECE_BYTES):
        return check_in_pieces(case, folder)


def check_in_pieces(case: dict[str, Any], folder: Path) -> list[Tensor]:
    results = []
    values = []
    saved = folder / case["name"]
    in_background = folder / f"{case['name']}_in_background"
    for offload in (False, True):
        backend = build(case, folder, offload=offload)
        on_device = StateOnDevice(backend.policy)
        with on_device.watch() if offload else nullcontext():
            for _ in range(2):
                backend.update(0)
        values.append(None if backend.critic is None else backend.score("critic"))
        results.append(states(backend))
        if not offload:
            backend.save(saved)
            again = folder / f"{case['name']}_same"
            with patch.object(dist, "gather_object", side_effect=AssertionError("planned again")):
                backend.save(again)
            check_same_files(saved, again)
            backend.update(0)
        else:
            with writing_delayed():
                check_offloaded(backend)
                with on_device.watch():
                    backend.start_save(in_background)
                check_offloaded(backend)
                backend.update(0)
                check_offloaded(backend)
            # written from copies of that time, while storages were empty or a step further
            finish_save(backend)
            check_same_files(saved, in_background)
        results.append(states(backend))
        backend.close()
    resumed = build(case, folder, offload=True)  # a checkpoint of a run without offload
    on_device = StateOnDevice(resumed.policy)
    with on_device.watch():
        resumed.load(saved)
    assert on_device.most > 0, "the moments were made on the device"
    check_offloaded(resumed)
    resumed.save(folder / f"{case['name']}_again")  # ... and one written with it, read without
    resumed.update(0)
    results.append(states(resumed))
    resumed.close()
    again = build(case, folder, offload=False)
    again.load(folder / f"{case['name']}_again")
    again.update(0)
    results.append(states(again))
    again.close()
    if values[0] is not None:
        assert values[1] is not None
        assert torch.equal(values[0]["values"], values[1]["values"])
    after_two = results[0]
    after_three = results[1]
    assert any(not torch.equal(a, b) for a, b in zip(after_two, after_three))
    for what, other, expected in zip(
        ("two steps", "three", "resumed with offload", "resumed without"), results[2:],
        (after_two, after_three, after_three, after_three),
    ):  # fmt: skip
        assert len(other) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(other, expected)), what
    return after_three


if __name__ == "__main__":
    main(run)
