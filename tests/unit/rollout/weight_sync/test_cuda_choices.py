"""The choices that depend on GPUs.

No GPU code runs here: the tests look at the choice and at the arguments that it leads to.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import os
import pickle
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from rlcore.errors import RunFailed
from rlcore.interfaces import RankAddress
from rlcore.stores import bound_store
from rlcore.weights import Bucket, TensorSpec, cut_buckets
from rollout.weight_sync import process_group as weight_group
from rollout.weight_sync import sender as sender_module
from rollout.weight_sync import tensor
from rollout.weight_sync.distributed import DistributedTransport
from rollout.weight_sync.process_group import (
    SHARED_GPU,
    GroupAddress,
    WeightGroup,
    choose_backend,
    make_group,
    start_thread,
)
from rollout.weight_sync.sender import GroupSender
from rollout.weight_sync.tensor import (
    BYTES,
    COUNTER,
    DEVICE,
    HANDLE,
    SerializedSender,
    TensorTransport,
)

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
        self.gpus = ("here 0", "here 1")[:ranks] if gpu is not None else ()
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
    ("engine", "backend"), [("GPU-a", "nccl"), ("GPU-b", "nccl"), (None, "gloo")]
)
def test_nccl_joins_processes_on_one_gpu_where_it_is_asked_to(
    engine: str | None, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARED_GPU, "1")
    assert choose_backend("GPU-a", engine) == backend


def test_both_sides_of_a_group_are_told_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is the trainer; an engine of two tensor-parallel ranks has ranks 1 and 2 of a group of
    three.
    """
    made: list[GroupAddress] = []

    def group(address: GroupAddress, rank: int, **given: Any) -> SimpleNamespace:
        assert (rank, given["device"]) == (0, CUDA)
        made.append(address)
        return SimpleNamespace(address=address, is_open=True, close=lambda: None)

    monkeypatch.setattr(sender_module, "WeightGroup", group)
    monkeypatch.setattr(weight_group.torch.cuda, "set_device", lambda device: None)
    engine = Engine("GPU-b")
    transport = DistributedTransport(timeout_s=5.0, probe_s=5.0)
    transport.ranks = [RankAddress("here", "GPU-a", "here 0")]
    sender = GroupSender(CUDA, 5.0)
    assert asyncio.run(transport.open([engine], [BUCKET])) == {}
    answers = {0: sender.open(transport.orders().ranks[0], [BUCKET])}
    assert asyncio.run(transport.join(answers)) == {}
    sender._end_joining()
    [(address, rank)] = engine.joined
    assert made == [address]
    assert (address.backend, address.world_size, rank) == ("nccl", 3, 1)


@pytest.mark.parametrize("device", [CUDA, torch.device("cuda")], ids=["numbered", "the current"])
def test_an_nccl_group_is_nccl_with_a_watchdog_beyond_our_deadline(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NCCL:
        class Options:
            _timeout: Any = None

            def __init__(self) -> None:
                self.config = SimpleNamespace(blocking=None)

        def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
            self.given = (rank, size, options._timeout.total_seconds())
            self.blocking = options.config.blocking
            self.dumps = os.environ[weight_group.DUMPS]
            self.connected: list[torch.device] = []

        def eager_connect_single_device(self, device: torch.device) -> None:
            self.connected.append(device)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    monkeypatch.setenv(weight_group.NONBLOCKING_TIMEOUT, "")
    monkeypatch.delenv(weight_group.NONBLOCKING_TIMEOUT)
    store = bound_store("127.0.0.1", 5.0)
    port = store.port
    address = GroupAddress("127.0.0.1", port, 2, "nccl", 4.5, "weights-1")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    group = make_group(address, 0, store, device)
    assert group.given == (0, 2, 4.5 * weight_group.WATCHDOG_FACTOR)
    # the communicator is begun at once, under the name by which torch looks for it later, and
    # waited for as long as we wait ourselves
    assert group.connected == [CUDA]
    assert group.blocking == 0
    assert os.environ[weight_group.NONBLOCKING_TIMEOUT] == "5"
    # else torch would ask the group's store for requests of dumps, and log that it is gone
    assert group.dumps == "0"
    assert os.environ.get(weight_group.DUMPS) is None


def test_groups_that_are_made_at_once_leave_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(weight_group.DUMPS, raising=False)

    def make() -> list[str | None]:
        seen = []
        for _ in range(50):
            with weight_group._without_dumps():
                time.sleep(0)  # another thread's turn
                seen.append(os.environ.get(weight_group.DUMPS))
        return seen

    made = [start_thread(make, torch.device("cpu")) for _ in range(4)]
    assert {value for one in made for value in one.result(30)} == {"0"}
    assert weight_group.DUMPS not in os.environ


def test_a_broadcast_that_an_abort_ends_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's work is completed then, and raises nothing."""
    aborted = threading.Event()
    started = threading.Event()

    def broadcast(flat: torch.Tensor, root: int) -> SimpleNamespace:
        started.set()
        return SimpleNamespace(is_completed=aborted.is_set, wait=lambda: True)

    bare = SimpleNamespace(broadcast=broadcast, abort=aborted.set)
    monkeypatch.setattr(weight_group, "make_group", lambda *given: bare)
    address = GroupAddress("127.0.0.1", 1, 2, "nccl", 30.0)
    group = WeightGroup(address, 1, device=torch.device("cpu"), store=dist.HashStore())
    received = start_thread(lambda: group.receive(8), torch.device("cpu"))
    assert started.wait(30)
    group.close()
    with pytest.raises(RunFailed, match="was closed in a broadcast of 8 bytes"):
        received.result(30)


# --- by handle ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trainer", "engine", "by"),
    [
        (["0", "1"], "GPU-a", "handle"),
        # no rank is on the second GPU of the engine
        (["0"], "GPU-a", "value"),
        (["0", "1"], None, "value"),
        ([None], "GPU-a", "value"),
    ],
)
async def test_handles_are_sent_where_a_rank_is_on_each_gpu_of_the_engine(
    trainer: list[str | None], engine: str | None, by: str
) -> None:
    """Each tensor-parallel rank gets the handle of its own GPU; bytes are packed once."""
    taker = Engine(engine)
    transport = TensorTransport(timeout_s=5.0)
    transport.ranks = [
        RankAddress("here", number, None if number is None else f"here {number}")
        for number in trainer
    ]
    transport.ranks += [RankAddress("elsewhere", "2", "elsewhere 1")]

    assert await transport.open([taker], [BUCKET]) == {}
    orders = transport.orders()
    assert orders.gathers == (by == "handle")
    assert orders.ranks == ({0: HANDLE, 1: HANDLE} if orders.gathers else {0: BYTES})
    packed = {rank: json.dumps({"payload": f"handle of {rank}"}) for rank in orders.ranks}
    assert await transport.send(0, packed if orders.gathers else {0: "bytes"}) == {}
    expected = {"handle": ["handle of 0", "handle of 1"], "value": ["bytes", "bytes"]}
    assert taker.taken == [expected[by]]


def test_a_handle_is_of_memory_that_nobody_else_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine answers when its copies are queued: the bucket is gathered into long before they
    have run.
    """
    order: list[str] = []

    class OnGPU:
        is_cuda = True
        device = CUDA

        def detach(self) -> OnGPU:
            return self

        def clone(self) -> SimpleNamespace:
            order.append("copied")
            return SimpleNamespace(device=CUDA, is_own=True)

    def stream(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(synchronize=lambda: order.append("waited"))

    def handle(bucket: Bucket, own: Any) -> tuple[str, tuple[bytes, int]]:
        assert own.is_own
        order.append("shared")
        return "a handle", (b"/counters", 7)

    released: list[tuple[bytes, int]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: order.append("collected"))
    monkeypatch.setattr(tensor, "by_handle", handle)
    monkeypatch.setattr(
        torch.UntypedStorage,
        "_release_ipc_counter_cuda",
        lambda name, offset: released.append((name, offset)),
    )
    sender = SerializedSender()
    sender.open(HANDLE, [BUCKET])
    flat: Any = OnGPU()
    made = sender.pack(BUCKET, flat)
    sender.end(done=True, stopped=None)
    assert order == ["copied", "waited", "shared", "collected"]
    assert tensor.payload_of(made) == "a handle"
    sender.discard({3: made}, [3])
    assert released == [], "an engine still reads it"
    sender.discard({3: made}, None)
    assert released == [(b"/counters", 7)]


def test_a_handle_names_the_gpu_by_its_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader may number its GPUs otherwise: torch's own pickle holds the number."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names[DEVICE] == "storage_device"
    assert names[COUNTER : COUNTER + 2] == ["ref_counter_handle", "ref_counter_offset"]
    arguments = [f"<{name}>" for name in names]
    monkeypatch.setattr(reductions, "reduce_tensor", lambda value: (rebuilt, tuple(arguments)))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a")
    )
    payload, counter = tensor.by_handle(BUCKET, torch.zeros(16, dtype=torch.uint8))
    assert counter == ("<ref_counter_handle>", "<ref_counter_offset>")
    content = pickle.loads(base64.b64decode(payload))
    expected = ["GPU-a" if name == "storage_device" else f"<{name}>" for name in names]
    assert content["flattened_tensor"] == expected
    assert [(one.name, one.start_idx, one.end_idx) for one in content["metadata"]] == [
        ("weight", 0, 16)
    ]


def rebuilt(*arguments: str) -> list[str]:
    return list(arguments)
