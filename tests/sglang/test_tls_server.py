"""A real server behind TLS: keys and digests are on the wire in no clear text."""

from __future__ import annotations

from pathlib import Path

import pytest
import server_kit
from publication_kit import connect, publish, random_weights, run_config, sink_over

from rlcore.errors import UserError
from tests.certificates import Authority
from tests.listeners import programs


def test_a_publication_and_a_client_of_another_authority(tiny_model: Path, tmp_path: Path) -> None:
    tls = Authority(tmp_path).tls("127.0.0.1")
    served = server_kit.launch(server_kit.managed(tiny_model, tmp_path / "tls.log", tls=tls))
    try:
        assert served.url.startswith("https://127.0.0.1:")
        config = run_config(str(tiny_model), tmp_path, served.config, transport="distributed")
        config.cluster.tls = tls
        engine = connect(config, served.url, served.keys, served.loop)
        assert engine.digests_buckets
        sink, participants = sink_over(config, [engine], served.loop)
        publish(sink, random_weights(tiny_model, 1), 3)
        assert participants.dropped == {}
        assert served.call(engine.health())["version"] == 3
        assert served.server.pid is not None
        found = programs(served.server.pid)
        assert "SGLang server" in found
        assert set().union(*found.values()) == {"127.0.0.1"}, found
        sink.close()
        served.call(engine.close())
        config.cluster.tls = Authority(tmp_path, "stranger").tls("127.0.0.1")
        with pytest.raises(UserError, match=r"127\.0\.0\.1 is not accepted by .*stranger\.pem"):
            connect(config, served.url, served.keys, served.loop)
    finally:
        server_kit.close(served)
