"""Which layer's experts a router is told, in models that have experts in some layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.model.routing_replay import replay_routing

from rlcore.errors import ConfigError


def chunk(*numbers: int, experts: tuple[bool, ...], fused: bool = False) -> Any:
    """A pipeline stage with the layers of these numbers, from 1."""
    layers = [
        SimpleNamespace(
            layer_number=number,
            mlp=SimpleNamespace(router=SimpleNamespace()) if experts[number - 1] else object(),
        )
        for number in numbers
    ]
    return SimpleNamespace(
        config=SimpleNamespace(moe_router_fusion=fused), decoder=SimpleNamespace(layers=layers)
    )


def architecture(*experts: bool) -> Any:
    return SimpleNamespace(num_experts=4, family="qwen3_moe", moe_layers=[*experts])


def indices(stage: Any) -> list[int]:
    routers = [getattr(layer.mlp, "router", None) for layer in stage.decoder.layers]
    return [router.router_replay.index for router in routers if router is not None]


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        ((True, True, True, True), [[0, 1], [2, 3]]),
        ((False, True, True, True), [[0], [1, 2]]),
        ((True, False, True, False), [[0], [1]]),
    ],
)
def test_layers_with_experts_are_counted_over_the_whole_model(
    experts: tuple[bool, ...], expected: list[list[int]]
) -> None:
    stages = [chunk(1, 2, experts=experts), chunk(3, 4, experts=experts)]
    replay_routing(stages, architecture(*experts))
    assert [indices(stage) for stage in stages] == expected


def test_a_fused_router_is_refused() -> None:
    with pytest.raises(ConfigError, match="a fused router cannot replay experts"):
        replay_routing([chunk(1, experts=(True,), fused=True)], architecture(True))
