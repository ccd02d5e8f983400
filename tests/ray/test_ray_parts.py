"""Parts of the Ray launcher without a run: batches between actors, hangs, and failed starts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlcore.errors import RunFailed
from rlcore.launch.ray.actor_env import ActorEnv
from rlcore.launch.ray.calls import ActorLost, HangDetector, get
from rollout.engines.factories import Keys
from tests.ray.actors import Hanging, Service, config_of_a_run

LIMIT_S = 10.0
START_S = 240.0  # for a process, on a busy machine

pytestmark = pytest.mark.usefixtures("connected")


@pytest.fixture(scope="module")
def connected(cluster: Any) -> Iterator[None]:
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()


def test_a_batch_is_read_where_it_lies() -> None:
    """On one node every array is a read-only view of the object store, the same for all."""

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    ref = (
        ray.remote(Service)
        .options(num_cpus=0, scheduling_strategy=here)
        .remote()
        .next_step.remote()
    )
    batch, again = (ray.get(ref, timeout=START_S) for _ in range(2))
    for one, other in zip(batch.samples, again.samples, strict=True):
        for name in ("tokens", "loss_mask", "rollout_logprobs"):
            array = getattr(one, name)
            assert not array.flags.owndata
            assert not array.flags.writeable
            assert np.shares_memory(array, getattr(other, name)), f"{name} was copied"


def test_an_actor_that_cannot_begin_says_why_at_once() -> None:
    """It is no loss: another start would fail, too."""

    @ray.remote
    class Part:
        def __init__(self, actor_env: ActorEnv) -> None:
            actor_env.enter()

        def where(self) -> str:
            return os.getcwd()

    part = Part.options(max_restarts=-1, num_cpus=0).remote(
        ActorEnv("/nowhere/at all", "127.0.0.1", 1)
    )
    with pytest.raises(
        RunFailed, match=r"^rank 3: it could not begin: /nowhere/at all cannot be entered on node "
    ) as caught:
        get(part.where.remote(), limit_s=START_S, what="rank 3", key="cluster.start_timeout_s")
    assert not isinstance(caught.value, ActorLost)


@pytest.mark.full
def test_a_service_that_hangs_is_ended_and_its_log_says_where_it_stood(tmp_path: Path) -> None:
    config = config_of_a_run(cluster={"heartbeat_timeout_s": LIMIT_S})
    here = ActorEnv(os.getcwd(), "127.0.0.1", 1)
    actor = (
        ray.remote(Hanging)
        .options(max_restarts=-1, num_cpus=0)
        .remote(here, config, (), Keys.from_environment())
    )
    first, _ = ray.get(actor.status.remote(), timeout=START_S)
    detector = HangDetector(actor, limit_s=LIMIT_S)
    for _ in range(30):
        assert detector.check() is None, "it answers"
        time.sleep(0.1)
    actor.hang.remote(tmp_path / "service.log")
    began = time.monotonic()
    while (silent_s := detector.check()) is None:
        assert time.monotonic() < began + 3 * LIMIT_S
        time.sleep(0.1)
    assert silent_s >= LIMIT_S
    deadline = time.monotonic() + START_S
    second = first
    while second == first and time.monotonic() < deadline:
        try:
            second, _ = get(actor.status.remote(), limit_s=START_S, what="the new one", key="none")
        except ActorLost:  # Ray starts it again
            time.sleep(0.5)
    assert second != first
    assert " in hang\n" in (tmp_path / "service.log").read_text()
    ray.kill(actor)
