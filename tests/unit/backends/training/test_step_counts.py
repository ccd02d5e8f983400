"""A resumed optimizer knows how many steps it has taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.training.optimizer import ScheduledOptimizer


class CountsInGroups(torch.optim.SGD):
    """Stands in for AdamW of Transformer Engine and Apex."""


@pytest.mark.parametrize("kind", [torch.optim.AdamW, CountsInGroups])
def test_steps_go_where_the_optimizer_counts_them(kind: type[torch.optim.Optimizer]) -> None:
    """torch's AdamW counts by parameter, in place; that of Transformer Engine by group."""
    parameters = [torch.zeros(3), torch.zeros(2)]
    inner = kind(parameters, lr=0.1)
    optimizer = ScheduledOptimizer.__new__(ScheduledOptimizer)
    optimizer.megatron = SimpleNamespace(optimizer=inner, param_groups=inner.param_groups)
    optimizer.prepare_for_load()
    optimizer.set_steps_taken(7)
    assert optimizer.steps_taken == 7
    counts = [inner.state[parameter].get("step") for parameter in parameters]
    if kind is CountsInGroups:
        assert counts == [None, None]
        assert inner.param_groups[0]["step"] == 7
    else:
        assert counts == [7.0, 7.0]
        assert counts[0] is not counts[1]
        assert "step" not in inner.param_groups[0]
