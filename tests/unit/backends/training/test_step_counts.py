"""A resumed optimizer knows how many steps it has taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor

    from backends.megatron.checkpoint.optimizer_state import completed

MOMENT = torch.arange(3.0)


def plain() -> dict[str, Any]:
    """The state as Megatron's plain optimizer asks for it."""
    asked = ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.weight", torch.zeros(3))
    return {
        "state": {0: {"exp_avg": asked}},
        "param_groups": [{"params": LocalNonpersistentObject([0]), "eps": 1e-8}],
    }


@pytest.mark.parametrize("counts_in_groups", [False, True])
def test_the_plain_optimizer(counts_in_groups: bool) -> None:
    """torch's AdamW counts by parameter, that of Transformer Engine and Apex by group."""
    whole = completed(
        plain(),
        {"state": {0: {"exp_avg": MOMENT}}},
        steps_taken=7,
        counts_in_groups=counts_in_groups,
    )
    assert whole["state"].pop(0) == {"exp_avg": MOMENT}
    group = {"params": [0], "eps": 1e-8}
    assert whole["state"] == ({} if counts_in_groups else {"common_step": torch.tensor(7.0)})
    assert whole["param_groups"] == [group | ({"step": 7} if counts_in_groups else {})]


@pytest.mark.parametrize("counts_in_groups", [False, True])
def test_the_distributed_optimizer_takes_it_from_the_groups(counts_in_groups: bool) -> None:
    wanted = {"optimizer": {"param_groups": [{"eps": 1e-8}]}, "param_state": {}}
    whole = completed(wanted, None, steps_taken=7, counts_in_groups=counts_in_groups)
    assert whole == {"optimizer": {"param_groups": [{"eps": 1e-8, "step": 7}]}, "param_state": {}}
