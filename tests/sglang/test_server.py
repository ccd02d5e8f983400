"""Servers that we start leave nothing behind. Keys, external servers, errors at the start."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import server_kit
from server_kit import Served, appeared, gone

from rlcore.errors import ConfigError, RunFailed, UserError
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rollout.asyncio_utils import LoopThread
from rollout.engines.child_process import members
from rollout.engines.factories import Keys
from rollout.engines.sglang.external import ExternalServer


async def ask(
    url: str, route: str, key: str | None, body: dict[str, object] | None = None
) -> tuple[int, str]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        request = session.get(url + route) if body is None else session.post(url + route, json=body)
        async with request as response:
            return response.status, await response.text()


def one_token(served: Served) -> int:
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    return served.call(ask(served.url, "/generate", served.keys.api, body))[0]


# --- keys -----------------------------------------------------------------------------------------


def test_each_key_opens_its_own_routes(served: Served) -> None:
    api = served.keys.api
    admin = served.keys.admin
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    for key, generates, controls in (
        (api, 200, 401),
        (admin, 401, 200),
        (None, 401, 401),
        (api + "x", 401, 401),
    ):
        assert served.call(ask(served.url, "/generate", key, body))[0] == generates
        assert (
            served.call(ask(served.url, "/pause_generation", key, {"mode": "retract"}))[0]
            == controls
        )
        assert served.call(ask(served.url, "/continue_generation", key, {}))[0] == controls


def test_no_key_can_be_read_in_the_process_table_the_log_or_the_servers_answers(
    served: Served,
) -> None:
    seen = [
        served.server.log.read_text(),
        served.call(ask(served.url, "/server_info", served.keys.api))[1],
    ]
    for pid in members(served.server.pid):
        process = psutil.Process(pid)
        seen += [*process.cmdline(), *process.environ().values()]
    assert len(seen) > 50
    assert not any(key in text for text in seen for key in (served.keys.api, served.keys.admin))


def test_it_listens_on_loopback_alone(served: Served) -> None:
    port = int(served.url.rpartition(":")[2])
    listening = [
        c.laddr
        for c in psutil.net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    ]
    assert [address.ip for address in listening] == ["127.0.0.1"]


# --- external servers -----------------------------------------------------------------------------


def test_an_external_server_is_connected_and_left_running(served: Served) -> None:
    external = served.external()
    assert not external.managed
    assert served.call(external.start()) == served.url
    served.call(external.stop())
    served.call(external.kill())
    assert one_token(served) == 200


SIZES = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"family": "qwen2"}, r"a model of model_type 'qwen3' .*, expected 'qwen2'"),
        (
            {"alphabet": "0123456789+="},
            r"has a vocabulary of 31, expected \d\d, as .*\(model\.path\)",
        ),
    ],
)
def test_an_external_server_with_another_model_is_refused(
    served: Served, tmp_path: Path, other: dict[str, Any], message: str
) -> None:
    init_model(tmp_path / "other", ModelSpec(**SIZES | other))
    external = ExternalServer(
        "engine-0", served.url, str(tmp_path / "other"), config=served.config, keys=served.keys
    )
    with pytest.raises(ConfigError, match=message):
        served.call(external.start())


@pytest.mark.parametrize("wrong", ["api", "admin"])
def test_an_external_server_that_does_not_take_our_keys_names_where_they_come_from(
    served: Served, wrong: str
) -> None:
    keys = Keys(**{"api": served.keys.api, "admin": served.keys.admin} | {wrong: "guessed"})
    external = ExternalServer(
        "engine-0", served.url, str(served.model), config=served.config, keys=keys
    )
    with pytest.raises(UserError, match="RLCORE_ENGINE_API_KEY and RLCORE_ENGINE_ADMIN_KEY"):
        served.call(external.start())


def test_a_server_that_a_trainer_left_paused_is_told_to_go_on(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    assert (
        served.call(ask(served.url, "/pause_generation", served.keys.admin, {"mode": "retract"}))[0]
        == 200
    )
    assert served.call(ask(served.url, "/ready", None))[0] == 503
    served.call(served.external().start())
    assert "it is resumed" in caplog.text
    assert one_token(served) == 200
    caplog.clear()
    served.call(served.external().start())
    assert caplog.text == ""


# --- what goes wrong at the start -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "message"),
    [
        (
            {"max_runing_requests": 4},
            "no argument max_runing_requests; did you mean max_running_requests?",
        ),
        pytest.param(
            {"max_running_requests": "many"},
            "max-running-requests: invalid .* value: 'many'",
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_argument_that_sglang_does_not_take_is_named(
    tiny_model: Path, tmp_path: Path, server: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        server_kit.launch(server_kit.managed(tiny_model, tmp_path / "wrong.log", server=server))


def test_a_server_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(
        '{"model_type": "no_such_model", "vocab_size": 31}'
    )
    server = server_kit.managed(tmp_path / "model", tmp_path / "fails.log")
    with pytest.raises(
        RunFailed, match=r"fails ended before it was ready: exit code 1; the end of .*fails\.log:"
    ) as error:
        server_kit.launch(server)
    assert "no_such_model" in str(error.value)
    assert members(server.pid) == []


# --- whatever kills whom, nothing is left; a server starts again ----------------------------------


OWNER = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import server_kit
server_kit.launch(server_kit.managed(Path({model!r}), Path({log!r})))
"""


def test_nothing_outlives_a_trainer_that_is_killed_while_its_server_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    script = OWNER.format(
        folder=str(Path(__file__).resolve().parent),
        model=str(tiny_model),
        log=str(tmp_path / "owned.log"),
    )
    owner = subprocess.Popen([sys.executable, "-c", script])
    try:
        server = child_of(owner.pid)
        # a child whose interpreter has only just started, and knows of nothing yet
        appeared(server, "spawn_main")
    finally:
        owner.kill()
        owner.wait()
    assert gone(server)


@pytest.mark.full  # as test_engine_command.py, where a server dies once
def test_a_server_that_dies_leaves_nothing_and_starts_again(
    tiny_model: Path, tmp_path: Path
) -> None:
    server = server_kit.managed(tiny_model, tmp_path / "restarted.log")
    loop = LoopThread("restarted")
    starting = asyncio.run_coroutine_threadsafe(server.start(), loop.loop)
    while server.pid is None:
        time.sleep(0.01)
    first = server.pid
    # it could not even hear of it
    os.kill(appeared(first, "sglang::scheduler"), signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    with pytest.raises(RunFailed, match="ended before it was ready: killed by SIGKILL"):
        starting.result(60)
    assert members(first) == []

    served = Served(
        server, loop.call(server.start(), seconds=server_kit.START_S, what="starting again"), loop
    )
    assert server.pid != first
    assert one_token(served) == 200
    os.kill(appeared(server.pid, "sglang::scheduler"), signal.SIGKILL)
    served.call(until(server.ended), 60)  # a server without a scheduler does not hang on
    assert gone(server.pid)
    loop.close()


async def until(future: asyncio.Future[Any]) -> None:
    await asyncio.wait({future})


@pytest.mark.full
def test_a_server_of_two_ranks(tiny_model: Path, tmp_path: Path) -> None:
    served = server_kit.launch(
        server_kit.managed(tiny_model, tmp_path / "two.log", tensor_parallel=2)
    )
    assert one_token(served) == 200
    assert served.call(served.external(tensor_parallel=2).start()) == served.url
    os.kill(served.server.pid, signal.SIGKILL)
    assert gone(served.server.pid)  # both schedulers too
    served.loop.close()


def child_of(parent: int) -> int:
    """The server that a process has started: the leader of a group of its own."""
    deadline = time.monotonic() + server_kit.START_S
    while time.monotonic() < deadline:
        for child in psutil.Process(parent).children():
            if os.getpgid(child.pid) == child.pid:
                return child.pid
        time.sleep(0.05)
    raise AssertionError("the trainer started no server")
