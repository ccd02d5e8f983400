"""A resumed optimizer knows how many steps it has taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.training import optimizer as module
    from backends.megatron.training.offload import OffloadedTensors
    from backends.megatron.training.optimizer import ScheduledOptimizer


class CountsInGroups(torch.optim.SGD):
    """A stub of Transformer Engine's AdamW: it counts the steps of a group, not of a parameter."""

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1


def made(inner: torch.optim.Optimizer, *, offload: bool = False) -> ScheduledOptimizer:
    optimizer = ScheduledOptimizer.__new__(ScheduledOptimizer)
    optimizer.megatron = SimpleNamespace(
        optimizer=inner, param_groups=inner.param_groups, is_stub_optimizer=False
    )
    optimizer._model_storages = set()
    optimizer._in_bf16 = False
    optimizer.state = OffloadedTensors(
        optimizer._own_tensors, torch.device("cpu"), keep_on_device=not offload
    )
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, CountsInGroups])
def test_steps_go_where_the_optimizer_counts_them(kind: type[torch.optim.Optimizer]) -> None:
    """torch's AdamW counts by parameter, in place; that of Transformer Engine by group."""
    parameters = [torch.zeros(3), torch.zeros(2)]
    inner = kind(parameters, lr=0.1)
    optimizer = made(inner)
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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, CountsInGroups])
def test_a_step_in_pieces_counts_once(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "OPTIMIZER_PIECE", 1)
    parameters = [torch.nn.Parameter(torch.ones(size)) for size in (3, 2, 4)]
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    inner = kind(groups, lr=0.1)
    pieces: list[int] = []
    step = inner.step
    monkeypatch.setattr(inner, "step", lambda: pieces.append(len(inner.param_groups)) or step())
    optimizer = made(inner, offload=True)
    for parameter in parameters:
        parameter.grad = torch.ones(parameter.shape)
    for _ in range(2):
        optimizer._step_in_pieces(optimizer.megatron, 1.0)
    assert pieces == [1] * 6
    assert [group["params"] for group in inner.param_groups] == [parameters[:2], parameters[2:]]
    if kind is CountsInGroups:
        assert [group["step"] for group in inner.param_groups] == [2, 2]
    else:
        assert [inner.state[parameter]["step"] for parameter in parameters] == [2, 2, 2]
