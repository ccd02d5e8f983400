"""A start makes few gloo groups: each connects all its ranks with one another."""

from __future__ import annotations

from collections.abc import Iterator
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
ON_GPUS = "cpu:gloo,cuda:nccl"  # the default group of a rank on a GPU
LAYOUTS = {1: ParallelConfig(tensor=2, pipeline=4), 4: ParallelConfig(tensor=2)}  # by replicas


@pytest.fixture
def gloo_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The ranks of each gloo group that rank 0 of 8 has asked for; no group connects anything.

    A group that takes its backend from the default group has gloo where that one has.
    """
    asked: list[Any] = []
    new_group = dist.new_group

    def recording(ranks: Any = None, *args: Any, backend: Any = None, **options: Any) -> Any:
        assert not options.get("use_local_synchronization")
        if "gloo" in (backend or dist.get_backend_config(dist.group.WORLD)):
            asked.append(ranks)
        return new_group(ranks, *args, **options)

    monkeypatch.setattr(dist, "new_group", recording)
    yield asked
    state.destroy_parallel()
    dist.destroy_process_group()


def start(replicas: int) -> state.ParallelState:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    layout = LAYOUTS[replicas]
    stubs = [
        stub_mpu(tensor=2, pipeline=layout.pipeline, data=replicas, rank=rank)
        for rank in range(WORLD)
    ]
    coordinates = [
        (stub.get_data_parallel_rank(), stub.get_pipeline_model_parallel_rank()) for stub in stubs
    ]
    with megatron_device(torch.device("cpu")):
        return state.init_parallel(layout, timeout_s=60, seed=0, coordinates=coordinates)


def test_one_replica_needs_no_group_of_its_own(
    monkeypatch: pytest.MonkeyPatch, gloo_groups: list[Any]
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: ON_GPUS)
    parallel = start(1)
    assert gloo_groups == []
    assert parallel.control_group is dist.group.WORLD
    assert parallel.replica_group is dist.group.WORLD


REPLICAS = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("default", "made"),
    [
        (ON_GPUS, REPLICAS),
        ("cuda:nccl", [None, *REPLICAS]),  # as another program may, before `from_mpu`
    ],
)
def test_on_gpus_only_replicas_have_groups(
    monkeypatch: pytest.MonkeyPatch, gloo_groups: list[Any], default: str, made: list[Any]
) -> None:
    """Megatron's groups are of NCCL alone."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: default)
    parallel = start(4)
    assert gloo_groups == made
    assert (parallel.control_group is dist.group.WORLD) == ("cpu:gloo" in default)
    assert parallel.replica_group.size() == 2
