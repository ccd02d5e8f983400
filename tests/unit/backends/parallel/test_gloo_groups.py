"""A start makes few gloo groups: each connects all its ranks with one another."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from backends.megatron.cpu.shim import importing_megatron, megatron_device
from backends.megatron.testing import stub_mpu

with importing_megatron():
    import megatron.core.tensor_parallel  # noqa: F401  # its warnings are over before `init_parallel`

    from backends.megatron.parallel import state
from rlcore.config.sections.policy import ParallelConfig

WORLD = 8
REPLICAS = [[0, 1], [2, 3], [4, 5], [6, 7]]
LAYOUTS = {1: ParallelConfig(tensor=2, pipeline=4), 4: ParallelConfig(tensor=2)}  # by replicas


@pytest.fixture
def gloo_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The ranks of each gloo group that rank 0 of 8 has asked for; no group connects anything."""
    asked: list[Any] = []
    new_group = dist.new_group

    def recording(ranks: Any = None, *args: Any, backend: Any = None, **options: Any) -> Any:
        if backend == "gloo":
            asked.append(ranks)
        return new_group(ranks, *args, **options)

    monkeypatch.setattr(dist, "new_group", recording)
    yield asked
    state.destroy_parallel()
    dist.destroy_process_group()


def start(monkeypatch: pytest.MonkeyPatch, backend: str, replicas: int) -> state.ParallelState:
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=WORLD)
    layout = LAYOUTS[replicas]

    def coordinates(*_: Any) -> list[tuple[int, int]]:
        stubs = [
            stub_mpu(tensor=2, pipeline=layout.pipeline, data=replicas, rank=rank)
            for rank in range(WORLD)
        ]
        return [
            (stub.get_data_parallel_rank(), stub.get_pipeline_model_parallel_rank())
            for stub in stubs
        ]

    monkeypatch.setattr(state, "_gather_coordinates", coordinates)
    with megatron_device(torch.device("cpu")):
        return state.init_parallel(layout, timeout_s=60, seed=0)


def test_one_replica_needs_no_group_of_its_own(
    monkeypatch: pytest.MonkeyPatch, gloo_groups: list[Any]
) -> None:
    parallel = start(monkeypatch, "fake", 1)
    assert gloo_groups == []
    assert parallel.control_group is dist.group.WORLD
    assert parallel.replica_group is dist.group.WORLD


def test_all_ranks_make_the_groups_of_all_replicas(
    monkeypatch: pytest.MonkeyPatch, gloo_groups: list[Any]
) -> None:
    parallel = start(monkeypatch, "fake", 4)
    assert gloo_groups == REPLICAS
    assert parallel.control_group is dist.group.WORLD
    assert parallel.replica_group.size() == 2


def test_stages_with_different_groups_meet(tmp_path: Path) -> None:
    """Megatron's first stages have a group that others have not; real gloo ranks."""
    code = f"""
import datetime, sys, torch, torch.distributed as dist
from backends.megatron import ParallelState
from backends.megatron.testing import stub_mpu
rank = int(sys.argv[1])
limit = datetime.timedelta(seconds=60)
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=rank, world_size=4,
    timeout=limit)
for first_stage in ([0], [1]):
    dist.new_group(first_stage)
parallel = ParallelState.from_mpu(stub_mpu(pipeline=2, data=2, rank=rank), timeout_s=60)
ranks = torch.tensor([rank])
dist.all_reduce(ranks, group=parallel.replica_group)
print(ranks.item())
dist.destroy_process_group()
"""
    ranks = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        sums = [int(process.communicate(timeout=120)[0]) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert sums == [0 + 2, 1 + 3, 0 + 2, 1 + 3]


def test_a_default_group_for_gpus_alone_gets_one_beside_it(
    monkeypatch: pytest.MonkeyPatch, gloo_groups: list[Any]
) -> None:
    """Of a program of its own that uses `ParallelState.from_mpu`."""
    only_cuda: Callable[[Any], str] = lambda group: "cuda:nccl"  # noqa: E731
    monkeypatch.setattr(dist, "get_backend_config", only_cuda)
    parallel = start(monkeypatch, "fake", 4)
    assert gloo_groups == [list(range(WORLD)), *REPLICAS]
    assert parallel.control_group is not dist.group.WORLD
