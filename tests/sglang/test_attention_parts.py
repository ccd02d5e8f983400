"""A real server with data-parallel attention: `rollout.engine.server.attn_dp_size`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import server_kit
from publication_kit import (
    PROMPT,
    TOLERANCE,
    Oracle,
    connect,
    publish,
    random_weights,
    request,
    run_config,
    sink_over,
)
from server_kit import Served

from rlcore.data.generation import Completion
from rlcore.data.sample import VersionSpan
from rollout.engines.sglang.engine import SGLangEngine
from rollout.engines.testing import check_engine

AT_ONCE = 6  # requests: SGLang deals them to the parts


@pytest.fixture(scope="module")
def divided(moe_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two ranks, each of which attends to sequences of its own and has half of each expert."""
    log = tmp_path_factory.mktemp("divided") / "server.log"
    server = {"attn_dp_size": 2}
    served = server_kit.launch(server_kit.managed(moe_model, log, tensor_parallel=2, server=server))
    yield served
    server_kit.close(served)


@pytest.mark.parametrize(
    "transport", ["distributed", pytest.param("tensor", marks=pytest.mark.full)]
)
def test_all_parts_generate_with_what_was_published(
    divided: Served, tmp_path: Path, transport: str
) -> None:
    config = run_config(str(divided.model), tmp_path, divided.config, transport=transport)
    engine = connect(config, divided.url, divided.keys, divided.loop)
    sink, participants = sink_over(config, [engine], divided.loop)
    for version, seed in ((5, 1), (6, 2)):
        weights = random_weights(divided.model, seed)
        publish(sink, weights, version)
        oracle = Oracle(divided.model, weights)
        asked = [request(draw=draw) for draw in range(AT_ONCE)]
        for [completion] in divided.call(engine.generate(asked)):
            assert completion.versions == (VersionSpan(version, 0, 12),)
            assert oracle.errors(PROMPT, completion).max() < TOLERANCE
    assert participants.dropped == {}
    sink.close()
    divided.call(engine.close())


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
    config = run_config(str(divided.model), tmp_path, divided.config, on_update=mode)
    engine = connect(config, divided.url, divided.keys, divided.loop)
    sink, _ = sink_over(config, [engine], divided.loop)
    old, new = (Oracle(divided.model, random_weights(divided.model, seed)) for seed in (1, 2))
    publish(sink, random_weights(divided.model, 1), version)
    pending = [start(divided, engine, draw) for draw in range(4)]
    divided.call(divided.until_used(2 * (len(PROMPT) + 50)))
    publish(sink, random_weights(divided.model, 2), version + 1)
    [[later]] = divided.call(engine.generate([request(draw=9)]))
    assert later.versions == (VersionSpan(version + 1, 0, 12),)
    assert new.errors(PROMPT, later).max() < TOLERANCE
    for completion in (future.result(120)[0][0] for future in pending):
        made = len(completion.tokens)
        first = completion.versions[0]
        assert first.version == version
        assert 0 < first.end <= made
        assert old.errors(PROMPT, completion)[: first.end].max() < TOLERANCE
        if mode == "abort":
            assert (completion.versions, completion.finish_reason) == ((first,), "abort")
            continue
        assert completion.versions == (first, VersionSpan(version + 1, first.end, made))
        errors = new.errors(PROMPT, completion)[first.end :]
        assert (errors.max() < TOLERANCE) == (mode == "retract")
    sink.close()
    divided.call(engine.close())


def start(served: Served, engine: SGLangEngine, draw: int) -> Future[list[list[Completion]]]:
    """Start a long response."""
    work: Any = engine.generate([request(PROMPT, draw=draw, tokens=300)])
    return asyncio.run_coroutine_threadsafe(work, served.loop.loop)


@pytest.mark.full
def test_it_keeps_the_contract(divided: Served, tmp_path: Path) -> None:
    config = run_config(str(divided.model), tmp_path, divided.config)

    def another() -> SGLangEngine:
        return SGLangEngine(
            divided.external(),
            config=config.rollout.engine,
            keys=divided.keys,
            model_path=str(divided.model),
        )

    report = check_engine(another, config=config)
    assert {rule.name for rule in report.skipped} == {"repeatable"}
