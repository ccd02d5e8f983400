"""When a rank's experts are computed by a grouped matmul."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.model.grouped_experts import groups_matmuls


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True), ({"cuda": False}, False), ({"dtype": torch.float32}, False),
        ({"capability": 8}, False), ({"capability": 10}, True), ({"shape": (64, 36)}, False),
        ({"on_input": True}, False), ({"deterministic": True}, False),
    ],
)  # fmt: skip
def test_in_bf16_on_a_hopper(
    changed: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {
        "cuda": True, "dtype": torch.bfloat16, "capability": 9, "shape": (64, 32),
        "on_input": False, "deterministic": False, **changed,
    }  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (case["capability"], 0))
    monkeypatch.setattr(
        torch, "are_deterministic_algorithms_enabled", lambda: case["deterministic"]
    )
    weight = SimpleNamespace(shape=case["shape"])
    experts: Any = SimpleNamespace(
        local_experts=[SimpleNamespace(linear_fc2=SimpleNamespace(weight=weight), modules=list)],
        config=SimpleNamespace(moe_apply_probs_on_input=case["on_input"]),
    )
    device = torch.device("cuda" if case["cuda"] else "cpu")
    hidden: Any = SimpleNamespace(dtype=case["dtype"], device=device)
    assert groups_matmuls(experts, hidden) == expected
