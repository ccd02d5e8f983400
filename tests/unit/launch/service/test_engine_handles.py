"""What rank 0 knows of an engine behind the rollout service."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rlcore.launch.service.engine_handles import RemoteEngineHandle
from rlcore.launch.service.host import EngineInfo


@pytest.mark.parametrize("told", [True, False])
def test_a_publication_knows_whether_an_engine_digests_and_queues_buckets(told: bool) -> None:
    engine = SimpleNamespace(
        name="engine-0", managed=True, transports=("distributed",), url="http://10.0.0.9:1",
        group_ranks=2, in_group=None, digests_weights=told, queues_buckets=not told,
    )  # fmt: skip
    client: Any = None
    handle = RemoteEngineHandle(client, EngineInfo.of(engine))
    assert (handle.digests_weights, handle.queues_buckets) == (told, not told)


def test_an_engine_that_no_process_group_reaches_needs_to_tell_nothing_of_groups() -> None:
    engine = SimpleNamespace(name="engine-0", managed=False, transports=("disk",))
    info = EngineInfo.of(engine)
    assert (info.transports, info.url, info.in_group) == (("disk",), "", None)
