from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from rlcore.algorithms import EstimatorInputs
from rlcore.algorithms import registry as _registry

from .helpers import random_inputs


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_inputs() -> Callable[..., EstimatorInputs]:
    """Build a random float64 batch; keyword arguments replace fields."""
    return random_inputs


@pytest.fixture
def clean_registry() -> Iterator[None]:
    """Forget what a test registered."""
    tables = (_registry._ESTIMATORS._plugins, _registry._POLICY_LOSSES._plugins)
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before):
        table.clear()
        table.update(entries)
