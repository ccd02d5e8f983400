"""The choices that depend on GPUs.

No GPU code runs here: the tests look at the choice and at the arguments that it leads to.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from rlcore.config.sections.rollout import EngineConfig
from rlcore.weights import TensorSpec, cut_buckets
from rollout.weight_sync import process_group as distributed
from rollout.weight_sync import process_group as weight_group
from rollout.weight_sync import serialized as tensor
from rollout.weight_sync.choose import choose_name
from rollout.weight_sync.process_group import (
    DistributedTransport,
    GroupAddress,
    choose_backend,
    make_group,
)
from rollout.weight_sync.serialized import DEVICE, TensorTransport

SGLANG = ("distributed", "tensor", "disk", "delta")
[BUCKET] = cut_buckets([TensorSpec("weight", (4,), "float32")], 1 << 20)
CUDA = torch.device("cuda", 0)


class Engine:
    """Takes whatever it is sent, and says where it is."""

    def __init__(self, gpu: str | None, *, ranks: int = 2) -> None:
        self.name = "engine-0"
        self.url = "http://127.0.0.1:30000"
        self.gpu = gpu
        self.group_ranks = ranks
        self.in_group: str | None = None
        self.joined: list[tuple[GroupAddress, int]] = []
        self.taken: list[list[str]] = []

    async def health(self) -> dict[str, Any]:
        return {"gpu": self.gpu, "device": "cpu" if self.gpu is None else "cuda"}

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        self.joined.append((address, rank))

    async def receive_serialized(self, index: int, payloads: list[str]) -> None:
        self.taken.append(payloads)


# --- over a process group -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "engine", "backend"),
    [
        ("GPU-a", "GPU-b", "nccl"),
        ("GPU-a", "GPU-a", "gloo"),
        (None, None, "gloo"),
        ("GPU-a", None, "gloo"),
    ],
)
def test_nccl_joins_different_gpus(trainer: str | None, engine: str | None, backend: str) -> None:
    assert choose_backend(trainer, engine) == backend


def test_both_sides_of_a_group_are_told_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is the trainer; an engine of two tensor-parallel ranks has ranks 1 and 2 of a group of
    three.
    """
    made: list[GroupAddress] = []

    def group(address: GroupAddress, rank: int, **given: Any) -> SimpleNamespace:
        assert (rank, given["device"]) == (0, CUDA)
        made.append(address)
        return SimpleNamespace(address=address, is_open=True, close=lambda: None)

    monkeypatch.setattr(distributed, "gpu_identity", lambda device: "GPU-a")
    monkeypatch.setattr(distributed, "WeightGroup", group)
    engine = Engine("GPU-b")
    transport = DistributedTransport(device=CUDA, timeout_s=5.0, probe_s=5.0)
    assert asyncio.run(transport.open([engine], [BUCKET])) == {}
    [(address, rank)] = engine.joined
    assert made == [address]
    assert (address.backend, address.world_size, rank) == ("nccl", 3, 1)


def test_an_nccl_group_is_nccl_with_a_watchdog_beyond_our_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class NCCL:
        class Options:
            _timeout: Any = None

        def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
            self.given = (rank, size, options._timeout.total_seconds())

    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    store, port = weight_group.open_store("127.0.0.1", 5.0)
    group = make_group(GroupAddress("127.0.0.1", port, 2, "nccl", 5.0, "weights-1"), 0, store)
    assert group.given == (0, 2, 5.0 * weight_group.WATCHDOG_FACTOR)


# --- by handle ------------------------------------------------------------------------------------


def test_colocated_engines_take_weights_from_memory_to_memory() -> None:
    assert choose_name(EngineConfig(kind="sglang", colocated=True), [SGLANG, SGLANG]) == "tensor"
    assert choose_name(EngineConfig(kind="sglang"), [SGLANG, SGLANG]) == "distributed"


@pytest.mark.parametrize(
    ("trainer", "engine", "by"),
    [("cuda", "GPU-a", "handle"), ("cuda", None, "value"), ("cpu", None, "value")],
)
def test_handles_are_sent_where_both_are_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, trainer: str, engine: str | None, by: str
) -> None:
    """Each tensor-parallel rank needs a handle of its own; bytes are packed once."""
    counts = {"handle": 0, "value": 0}

    def payload(kind: str) -> str:
        counts[kind] += 1
        return f"{kind} {counts[kind]}"

    waited: list[torch.device] = []
    monkeypatch.setattr(tensor, "by_handle", lambda bucket, flat: payload("handle"))
    monkeypatch.setattr(tensor, "by_value", lambda bucket, flat: payload("value"))
    monkeypatch.setattr(
        torch.cuda,
        "current_stream",
        lambda device: SimpleNamespace(synchronize=lambda: waited.append(device)),
    )
    flat: Any = SimpleNamespace(is_cuda=trainer == "cuda", device=CUDA)
    taker = Engine(engine)
    transport = TensorTransport(timeout_s=5.0, probe_s=5.0)

    async def publish() -> None:
        assert await transport.open([taker], [BUCKET]) == {}
        assert await transport.send(BUCKET, flat) == {}

    asyncio.run(publish())
    assert taker.taken == [["handle 1", "handle 2"] if by == "handle" else ["value 1", "value 1"]]
    assert waited == ([CUDA] if by == "handle" else [])


def test_a_handle_names_the_gpu_by_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader may number its GPUs otherwise: torch's own pickle holds the number."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[DEVICE] == "storage_device"
    arguments = [f"<{name}>" for name in names]
    monkeypatch.setattr(reductions, "reduce_tensor", lambda value: (rebuilt, tuple(arguments)))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a")
    )
    content = pickle.loads(
        base64.b64decode(tensor.by_handle(BUCKET, torch.zeros(16, dtype=torch.uint8)))
    )
    expected = ["GPU-a" if name == "storage_device" else f"<{name}>" for name in names]
    assert content["flattened_tensor"] == expected
    assert [(one.name, one.start_idx, one.end_idx) for one in content["metadata"]] == [
        ("weight", 0, 16)
    ]


def rebuilt(*arguments: str) -> list[str]:
    return list(arguments)
