"""A real server that is started for FP8 behind TLS, and gets every weight in FP8.

Keys and digests are on the wire in no clear text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import server_kit
from publication_kit import (
    PROMPT,
    Oracle,
    client_of,
    flatten,
    generate,
    layout,
    publishing,
    random_weights,
)
from server_kit import Served

from rlcore.config.sections.training import TLSConfig
from rlcore.data.sample import VersionSpan
from rlcore.errors import ConfigError, UserError
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.quantised_weights import dequantised, quantise_bucket, quantised_bucket
from tests.certificates import Authority
from tests.listeners import programs


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TLSConfig:
    return Authority(tmp_path_factory.mktemp("tls")).tls("127.0.0.1")


@pytest.fixture(scope="module")
def served_fp8(tmp_path_factory: pytest.TempPathFactory, tls: TLSConfig) -> Iterator[Served]:
    """Each projection has whole blocks of 128 x 128, as SGLang asks."""
    folder = tmp_path_factory.mktemp("fp8")
    init_model(folder / "model", ModelSpec(layers=2, kv_heads=4))
    settings = {"quantization": "fp8", "dtype": "bf16", "tls": tls}
    with server_kit.serving(folder / "model", folder / "fp8.log", **settings) as served:
        yield served


@pytest.mark.parametrize(
    "transport", ["distributed", pytest.param("tensor", marks=pytest.mark.full)]
)
def test_the_server_generates_with_what_the_blocks_stand_for(
    served_fp8: Served, tls: TLSConfig, tmp_path: Path, transport: str
) -> None:
    with publishing(served_fp8, tmp_path, tls=tls, transport=transport) as client:
        for version, seed in ((5, 1), (6, 2)):
            weights = random_weights(served_fp8.model, seed)
            buckets = layout(weights)
            client.sink.prepare([quantised_bucket(bucket) for bucket in buckets])
            held = {}
            for bucket in buckets:
                small = quantise_bucket(bucket, flatten(bucket, weights))
                held.update(dequantised(quantised_bucket(bucket).views(small)))
                client.sink.send(quantised_bucket(bucket), small)
            client.sink.finish(version)
            completion = generate(served_fp8, client.engine, draw=version)
            assert completion.versions == (VersionSpan(version, 0, 12),)
            # it computes in bf16
            of_blocks = Oracle(served_fp8.model, held).errors(PROMPT, completion).mean()
            of_weights = Oracle(served_fp8.model, weights).errors(PROMPT, completion).mean()
            assert of_blocks < 0.1
            assert of_blocks < of_weights / 2
        assert not client.participants.dropped


def test_a_client_of_another_authority_is_refused(served_fp8: Served, tmp_path: Path) -> None:
    assert served_fp8.url.startswith("https://127.0.0.1:")
    assert served_fp8.server.pid is not None
    found = programs(served_fp8.server.pid)
    assert "SGLang server" in found
    assert set().union(*found.values()) == {"127.0.0.1"}, found
    stranger = Authority(tmp_path, "stranger").tls("127.0.0.1")
    with pytest.raises(UserError, match=r"127\.0\.0\.1 is not accepted by .*stranger\.pem"):
        client_of(served_fp8, tmp_path, tls=stranger)


def test_a_server_of_other_blocks_is_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weight_block_size.*rollout.engine.quantization"):
        client_of(served, tmp_path, quantization="fp8")
