"""Parts of the Ray launcher without a run: failed starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from rlcore.errors import RunFailed
from rlcore.launch.ray.calls import ActorLost, enter_folder, get

START_S = 240.0  # for a process, on a busy machine

pytestmark = pytest.mark.usefixtures("connected")


@pytest.fixture(scope="module")
def connected(cluster: Any) -> Iterator[None]:
    ray.init(address=cluster.address, log_to_driver=False)
    yield
    ray.shutdown()


def test_an_actor_that_cannot_begin_says_why_at_once() -> None:
    """It is no loss: another start would fail, too."""

    @ray.remote
    class Part:
        def __init__(self, folder: str) -> None:
            enter_folder(folder)

        def where(self) -> str:
            return os.getcwd()

    part = Part.options(max_restarts=-1, num_cpus=0).remote("/nowhere/at all")
    with pytest.raises(
        RunFailed, match=r"^rank 3: it could not begin: /nowhere/at all cannot be entered on node "
    ) as caught:
        get(part.where.remote(), limit_s=START_S, what="rank 3", key="cluster.start_timeout_s")
    assert not isinstance(caught.value, ActorLost)
