from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from rlcore.algorithms import EstimatorInputs
from rlcore.algorithms import registry as _registry

from .helpers import LENGTHS, cu


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_inputs() -> Callable[..., EstimatorInputs]:
    """Build a random float64 batch; keyword arguments replace fields."""

    def make(lengths: tuple[int, ...] = LENGTHS, seed: int = 0, **changes: Tensor | None) -> EstimatorInputs:
        generator = torch.Generator().manual_seed(seed)

        def noise(n: int) -> Tensor:
            return torch.randn(n, generator=generator, dtype=torch.float64)

        cu_seqlens, size = cu(lengths), sum(lengths)
        groups = torch.randint(-2, 2, (len(lengths),), generator=generator)  # shuffled, negative ones too
        fields = {
            "rewards": noise(len(lengths)), "group_ids": groups, "values": noise(size), "kl": noise(size).abs(),
            "token_rewards": noise(size) / 10, "logprobs": -noise(size).abs(),
        }  # fmt: skip
        return EstimatorInputs(cu_seqlens=cu_seqlens, **{**fields, **changes})

    return make


@pytest.fixture
def clean_registry() -> Iterator[None]:
    """Forget what a test registered."""
    tables = (_registry._ESTIMATORS._plugins, _registry._POLICY_LOSSES._plugins)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before):
        table.clear()
        table.update(entries)
