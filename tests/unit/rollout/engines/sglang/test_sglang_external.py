"""The checks of a server that the user runs. The server here is scripted.

tests/sglang has a real one.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from engine_kit import VOCAB, with_client

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import ConfigError
from rollout.engines.factories import Keys
from rollout.engines.sglang.entry import VERSION
from rollout.engines.sglang.external import ExternalServer

INFO = {"version": VERSION, "tp_size": 1, "dp_size": 1, "pp_size": 1}


def connect(
    folder: Path, *, ready: bool = True, fp32_head: bool | None = None, **answers: Any
) -> list[tuple[str, bool]]:
    """The routes that were asked, each with whether under the admin key."""
    asked: list[tuple[str, bool]] = []
    model = json.loads((folder / "config.json").read_text())
    said = {
        "server_info": INFO,
        "model_info": {name: model.get(name) for name in ("model_type", "architectures")},
        "generate": {"error": {"message": f"valid range is [0, {VOCAB})"}},
    } | answers
    status = {"generate": 400, "ready": 200 if ready else 503}

    async def handler(request: web.Request) -> web.Response:
        route = request.path[1:]
        asked.append((route, request.headers["Authorization"] == "Bearer the-admin-key"))
        return web.json_response(said.get(route, {}), status=status.get(route, 200))

    async def use(client: Any) -> None:
        keys = Keys("the-api-key", "the-admin-key")
        server = ExternalServer(
            "engine-3",
            client.url,
            str(folder),
            config=EngineConfig(),
            keys=keys,
            fp32_head=fp32_head,
        )
        assert await server.start() == client.url

    with_client(handler, use)
    return asked


@pytest.mark.parametrize("ready", [True, False])
def test_a_server_is_told_to_go_on_only_where_it_takes_no_requests(
    folder: Path, ready: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        asked = connect(folder, ready=ready)
    told = [] if ready else [("continue_generation", True)]
    assert asked[-len(told) - 2 :] == [("ready", False), *told, ("generate", False)]
    assert (
        "engine engine-3 at http" in caplog.text and "it is resumed" in caplog.text
    ) is not ready


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"server_info": INFO | {"version": "0.5.22"}}, r"runs sglang 0\.5\.22, expected 0\.5\.23"),
        ({"server_info": "nginx"}, "runs sglang None"),
        (
            {"server_info": INFO | {"tp_size": 2}},
            r"has tp_size 2, expected 1; set rollout\.engine\.tensor_parallel",
        ),
        (
            {"server_info": INFO | {"dp_size": 2}},
            "has dp_size 2, expected 1; give each replica's URL",
        ),
        (
            {"server_info": INFO | {"quantization": "fp8", "load_format": "auto"}},
            "has quantization fp8 and load_format auto, expected none, or fp8 with load_format",
        ),
        ({"model_info": {"model_type": "llama"}}, "serves a model of model_type 'llama'"),
        ({"model_info": "nginx"}, "serves a model of model_type None"),
        (
            {"generate": {"error": "valid range is [0, 99)"}},
            f"has a vocabulary of 99, expected {VOCAB}",
        ),
        ({"generate": "no such thing"}, "does not report its vocabulary"),
    ],
)
def test_another_server_than_the_configuration_speaks_of(
    folder: Path, answers: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"engine engine-3 at http.* \(rollout\.engine\.urls\) {message}"
    ):
        connect(folder, **answers)


@pytest.mark.parametrize("asked_for", [True, False, None])
@pytest.mark.parametrize("has", [True, False])
def test_a_server_whose_logits_are_not_as_precise_as_the_trainers(
    folder: Path, asked_for: bool | None, has: bool
) -> None:
    server_info = INFO | {"enable_fp32_lm_head": has}
    if asked_for in (has, None):
        connect(folder, fp32_head=asked_for, server_info=server_info)
        return
    how = "with" if asked_for else "without"
    with pytest.raises(
        ConfigError,
        match=rf"has enable_fp32_lm_head {has}, expected {asked_for}, as the trainer's head"
        rf" \(policy\.logprobs\.fp32_head\); start the server {how} --enable-fp32-lm-head",
    ):
        connect(folder, fp32_head=asked_for, server_info=server_info)
