"""Of two servers, one stops during a publication: the other soon has the weights and serves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import server_kit
from publication_kit import (
    check_generation,
    config_of,
    connect,
    flatten,
    folder_weights,
    layout,
    publish,
    random_weights,
    sink_over,
)
from server_kit import Served

from rlcore.errors import PublicationFailed
from rollout.engines.sglang.engine import SGLangEngine

LIMIT_S = 8.0  # of a bucket
ENOUGH_S = 3 * LIMIT_S  # for the deadline, the kill, and what is waited for in between


@pytest.fixture
def doomed(served: Served, tmp_path: Path) -> Iterator[SGLangEngine]:
    """A second server besides the session's."""
    server = server_kit.managed(
        served.model, tmp_path / "doomed.log", update_timeout_s=LIMIT_S, health_timeout_s=60.0
    )
    engine = SGLangEngine(
        server, config=server.config, keys=server.keys, model_path=str(served.model)
    )
    served.call(engine.start(), server_kit.START_S)
    yield engine
    served.call(engine.kill())


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_server_that_hangs_in_a_bucket_holds_up_nobody(
    served: Served, doomed: SGLangEngine, tmp_path: Path
) -> None:
    config = config_of(served, tmp_path, update_timeout_s=LIMIT_S)
    survivor = connect(config, served.url, served.keys, served.loop)
    sink, participants = sink_over(config, [doomed, survivor], served.loop)
    publish(sink, random_weights(served.model, 1), 30)
    pid = doomed.server.pid
    assert pid is not None

    weights = random_weights(served.model, 2)
    buckets = layout(weights)
    sink.prepare(buckets)
    sink.send(buckets[0], flatten(buckets[0], weights))
    os.killpg(pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(
        PublicationFailed,
        match=rf"bucket 1 .*did not answer .* within {LIMIT_S:g} s .*update_timeout_s",
    ):
        sink.send(buckets[1], flatten(buckets[1], weights))
    sink.cancel()
    assert participants.engines == [survivor]
    assert doomed.ended is not None
    assert doomed.ended.done()  # managed: it was ended, stopped as it was
    publish(sink, weights, 31)
    assert time.monotonic() - began < ENOUGH_S
    check_generation(served, survivor, weights, 31)

    publish(sink, folder_weights(served.model), 32)
    sink.close()
    served.call(survivor.close())
