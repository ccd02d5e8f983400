"""A real server with data-parallel attention: `rollout.engine.server.attn_dp_size`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import server_kit
from publication_kit import (
    PROMPT,
    check_contract,
    check_generation,
    check_update_during_responses,
    publish,
    publishing,
    random_weights,
)
from server_kit import Served

AT_ONCE = 6  # requests: SGLang deals them to the parts


@pytest.fixture(scope="module")
def divided(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two ranks, each of which attends to sequences of its own and has half of each expert."""
    log = tmp_path_factory.mktemp("divided") / "server.log"
    parts = {"tensor_parallel": 2, "server": {"attn_dp_size": 2}}
    with server_kit.serving(moe_model, log, **parts) as served:
        yield served


@pytest.mark.parametrize(
    "transport", ["distributed", pytest.param("tensor", marks=pytest.mark.full)]
)
def test_all_parts_generate_with_what_was_published(
    divided: Served, tmp_path: Path, transport: str
) -> None:
    with publishing(divided, tmp_path, transport=transport) as client:
        for version, seed in ((5, 1), (6, 2)):
            weights = random_weights(divided.model, seed)
            publish(client.sink, weights, version)
            check_generation(divided, client.engine, weights, version, n=AT_ONCE)
        assert client.participants.dropped == {}


# versions never come again: `in_place` leaves what was cached under one
@pytest.mark.parametrize(
    ("mode", "version"),
    [
        ("retract", 10),
        pytest.param("in_place", 20, marks=pytest.mark.full),
        pytest.param("abort", 30, marks=pytest.mark.full),
    ],
)
def test_an_update_while_all_parts_make_responses(
    divided: Served, tmp_path: Path, mode: str, version: int
) -> None:
    with publishing(divided, tmp_path, on_update=mode) as client:
        used = 2 * (len(PROMPT) + 50)
        check_update_during_responses(
            divided, client, mode, version, PROMPT, responses=4, used=used
        )


@pytest.mark.full
def test_it_keeps_the_contract(divided: Served, tmp_path: Path) -> None:
    check_contract(divided, tmp_path)
