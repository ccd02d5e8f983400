"""A world of one rank, in which Megatron saves and loads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from backends.megatron.cpu.shim import megatron_device


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with megatron_device(torch.device("cpu")):
        yield
    dist.destroy_process_group()
