"""The actors that the driver asks for, without a cluster."""

from __future__ import annotations

import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.launch.ray import driver as driver_module
from rlcore.launch.ray.cluster import Cluster
from rlcore.launch.ray.driver import Driver
from tests.configs import small_config


class FakeRay:
    """Notes each actor: its options, and the arguments that it is made with."""

    def __init__(self) -> None:
        self.made: list[tuple[dict[str, Any], tuple[Any, ...]]] = []

    def remote(self, cls: type) -> Any:
        def options(**given: Any) -> Any:
            def make(*arguments: Any) -> str:
                self.made.append((given, arguments))
                return f"actor {len(self.made)}"

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=options)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(driver_module, "ray", fake)
    monkeypatch.setattr(driver_module, "bundles", lambda needs: [{"CPU": 2.0, "GPU": 1.0}])
    monkeypatch.setattr(
        driver_module, "PlacementGroupSchedulingStrategy", lambda **given: {**given}
    )
    return fake


def test_each_engine_has_a_host_in_its_bundle_with_its_share_of_gpus(fake: FakeRay) -> None:
    config = small_config(rollout={"engine": {"kind": "sglang", "tensor_parallel": 2}})
    placement = SimpleNamespace(hosts=(0, 0, 2), engine=object())
    cluster = Cluster(placement, "10.0.0.1")  # type: ignore[arg-type]
    loaded: Any = SimpleNamespace(config=config)
    with ExitStack() as stack:
        driver = Driver(loaded, cluster, stack, SimpleNamespace())  # type: ignore[arg-type]
        group: Any = object()
        driver._host_engines(group, [["0", "1", "2", "3"], ["0", "1"], ["4", "0"]])
    for index, (options, arguments) in enumerate(fake.made):
        assert arguments[:3] == (os.getcwd(), config, index)
        assert arguments[4] == [["0", "1"], ["2", "3"], ["4", "0"]][index]
        assert options["scheduling_strategy"] == {
            "placement_group": group,
            "placement_group_bundle_index": placement.hosts[index],
        }
        assert options["num_gpus"] == 1.0
    assert len({options["name"] for options, _ in fake.made}) == 3
