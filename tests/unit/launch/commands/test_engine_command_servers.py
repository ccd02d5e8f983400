"""`rlcore engine`: servers that run alone, from the start to a signal or the end of the last."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlcore.config import Config
from rlcore.config.sections.rollout import RestartConfig
from rlcore.errors import ConfigError, RunFailed, UserError
from rlcore.launch.commands import engine as serve
from rlcore.launch.commands.engine import followers, node_of, run_servers, serve_engines
from rollout.engines.factories import ADMIN_KEY, API_KEY, EngineNode, EngineSite, Keys
from rollout.engines.sglang.factory import SGLangFactory
from tests.configs import small_config

QUICK = RestartConfig(limit=2, backoff_s=0.01)


@pytest.fixture(autouse=True)
def nothing_is_left_unsaid(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No error is left to asyncio, which reports it on the terminal of `rlcore engine`."""
    yield
    gc.collect()
    records = [*caplog.get_records("call"), *caplog.records]
    assert [record.getMessage() for record in records if record.name == "asyncio"] == []


class FakeServer:
    """Starts when told to; the result of `ended` is its death."""

    def __init__(self, name: str, *, fails: str = "", never: bool = False) -> None:
        self.name = name
        self.fails = fails
        self.never = never
        self.ended: asyncio.Future[int] | None = None
        self.cancelled = self.stopped = False
        self.ports: list[int] = []  # of its starts
        self.on_start: Callable[[], None] = lambda: None  # also of a start that never ends

    async def start(self, port: int = 0) -> str:
        self.ports.append(port)
        if self.fails:
            raise RunFailed(self.fails)
        if self.never:
            self.on_start()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0.02)  # for the process to end
                self.cancelled = True
                raise
        self.ended = asyncio.get_running_loop().create_future()
        self.on_start()
        return f"http://{self.name}:{port or 4000}"

    def die(self) -> None:
        assert self.ended is not None
        self.ended.set_result(-9)

    async def compiles(self) -> bool:
        return False

    def describe_end(self) -> str:
        return "killed by SIGKILL; the end of its log: out of memory"

    async def stop(self) -> None:
        assert self.cancelled or not self.never, "its start goes on"
        self.stopped = True


def run(
    servers: list[FakeServer], then=lambda: None, restart: RestartConfig = QUICK, follow=()
) -> list[str]:
    announced: list[str] = []

    def announce(urls) -> None:
        announced.extend(urls)
        then()

    asyncio.run(asyncio.wait_for(run_servers(servers, announce, follow, restart=restart), 60))
    return announced


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_of_them_cleanly(signum: signal.Signals) -> None:
    servers = [FakeServer("a"), FakeServer("b")]
    assert run(servers, lambda: os.kill(os.getpid(), signum)) == ["http://a:4000", "http://b:4000"]
    assert all(server.stopped for server in servers)


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_dead_server_is_restarted_at_the_same_url(capsys: pytest.CaptureFixture[str]) -> None:
    servers = [FakeServer("a"), FakeServer("b")]

    def die_once() -> None:
        servers[1].die()
        servers[1].on_start = interrupt

    assert run(servers, die_once) == ["http://a:4000", "http://b:4000"]
    assert (servers[0].ports, servers[1].ports) == ([0], [0, 4000])
    said = capsys.readouterr().err
    why = "b ended: killed by SIGKILL; the end of its log: out of memory"
    assert f"{why}\nb is started again in 0.01 s: 1 of 2" in said
    assert said.endswith("b runs again at http://b:4000\n")
    assert all(server.stopped for server in servers)


def test_a_server_out_of_restarts_is_left_alone_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class OutOfMemory(FakeServer):
        async def start(self, port: int = 0) -> str:
            if len(self.ports) == 2:  # the last start; the other server goes on behind it
                asyncio.get_running_loop().call_later(0.2, interrupt)
            return await super().start(port)

    servers = [FakeServer("a"), OutOfMemory("b")]

    def die() -> None:
        servers[1].fails = "no memory for b"
        servers[1].die()

    run(servers, die)
    assert servers[1].ports == [0, 4000, 4000]
    left = "b is left alone from now on (rollout.engine.restart.limit: 2)"
    assert f"no memory for b\n{left}" in capsys.readouterr().err


class Weak(FakeServer):
    """The second and third start fail; the others live a moment, the fourth for `life_s`."""

    life_s = 0.5
    clock_s = 0.0  # what `run_servers` takes for the time

    def die(self) -> None:
        if len(self.starts) == 4:
            self.clock_s += self.life_s
        super().die()

    async def start(self, port: int = 0) -> str:
        self.starts = [*getattr(self, "starts", []), time.monotonic()]
        self.fails = "no memory" if len(self.starts) in (2, 3) else ""
        url = await super().start(port)
        if len(self.starts) == 5:
            interrupt()
        asyncio.get_running_loop().call_soon(self.die)
        return url


def test_the_pause_grows_until_a_life_was_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Weak("a")
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: server.clock_s))
    run([server], restart=RestartConfig(limit=9, backoff_s=0.02, max_backoff_s=0.3))
    said = re.findall(r"started again in (\S+) s", capsys.readouterr().err)
    assert said[:4] == ["0.02", "0.04", "0.08", "0.02"]
    pauses = [later - start for start, later in itertools.pairwise(server.starts)]
    assert all(pause >= float(text) for pause, text in zip(pauses, said))


def test_a_server_is_left_alone_for_its_restarts_within_the_window(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = Weak("a")
    server.life_s = 0.0
    with pytest.raises(RunFailed, match="no engine is left"):
        run([server], restart=RestartConfig(limit=2, backoff_s=0.01))
    assert len(server.starts) == 3
    restart = RestartConfig(limit=2, backoff_s=0.02, max_backoff_s=0.02, window_s=0.01)
    server = Weak("b")
    server.life_s = 0.0
    run([server], restart=restart)
    assert len(server.starts) == 5, "until the test's interrupt"


def test_the_end_of_the_last_is_the_end() -> None:
    servers = [FakeServer("a"), FakeServer("b")]

    def die() -> None:
        for server in servers:
            server.fails = f"no memory for {server.name}"
            server.die()

    with pytest.raises(RunFailed, match="no engine is left: no memory for a; no memory for b"):
        run(servers, die)
    assert all(server.stopped for server in servers)


@pytest.mark.parametrize("again", [False, True])
def test_a_signal_while_one_starts_ends_that_start(again: bool) -> None:
    server = FakeServer("a", never=not again)

    def die() -> None:
        assert again, "nothing started"
        server.never = True
        server.on_start = interrupt
        server.die()

    if not again:
        server.on_start = interrupt
    run([server], die)
    assert server.cancelled
    assert server.stopped


def test_a_server_that_does_not_start_ends_the_start_of_the_others() -> None:
    servers = [FakeServer("a", never=True), FakeServer("b", fails="no memory for b")]
    with pytest.raises(RunFailed, match="no memory for b"):
        run(servers)
    assert servers[0].cancelled
    assert all(server.stopped for server in servers)


MACHINE = EngineNode(2, 0, "10.0.0.7:20000")
DELTA = {"transport": "delta", "weights_dir": "w"}


def served(run_dir: Path | str = "runs", **engine: object) -> Config:
    return small_config(run={"dir": str(run_dir)}, rollout={"engine": {"kind": "sglang", **engine}})


@pytest.mark.parametrize(
    ("engine", "node", "message"),
    [
        ({"kind": "embedded"}, None, "kind: got 'embedded', expected 'sglang'"),
        ({"urls": ["http://a:1"]}, None, "urls: these engines run already"),
        ({"colocated": True}, None, "colocated: the trainer itself starts"),
        ({"tensor_parallel": 4, "count": 2}, MACHINE, "count: got 2 with --nodes 2"),
        ({"tensor_parallel": 3}, MACHINE, "tensor_parallel: got 3, expected a multiple of"),
        ({**DELTA, "tensor_parallel": 4}, MACHINE, "transport: got delta with --nodes"),
    ],
)
def test_engines_that_cannot_run_alone_or_on_several_machines_are_refused(
    engine: dict[str, object], node: EngineNode | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^rollout.engine.{message}"):
        serve_engines(served(**engine), node=node)


def test_keys_are_not_printed_and_made_ones_stand_in_a_file_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = served(tmp_path)
    made: list[Keys] = []

    def servers(site: EngineSite, keys: Keys) -> list[FakeServer]:
        made.append(keys)
        return [FakeServer("a")]

    async def announced(servers, announce, follow, *, restart) -> None:
        announce(["http://a:1"])
        written[keys_file.stat().st_mode & 0o777] = keys_file.read_text()

    written: dict[int, str] = {}
    keys_file = tmp_path / "test-engines" / socket.gethostname() / "keys.sh"
    monkeypatch.setattr(SGLangFactory, "build_servers", servers)
    monkeypatch.setattr(serve, "run_servers", announced)
    monkeypatch.setenv(API_KEY, "a-key-of-mine-alone")
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    assert serve_engines(config) == 0
    said = capsys.readouterr().out
    assert written == {0o600: f"export {ADMIN_KEY}={made[0].admin}\n"}, "for their owner alone"
    assert not keys_file.exists(), "the engines have ended"
    assert f". {keys_file}\n" in said
    assert made[0].admin not in said
    assert "a-key-of-mine" not in said
    assert """rollout.engine.urls='["http://a:1"]'""" in said


def test_the_file_with_the_urls_is_there_only_while_the_engines_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "urls.json"
    seen = list[object]()
    file.write_text('["http://killed:1"]')

    async def run_both(servers, announce, follow, *, restart) -> None:
        seen.append(file.exists())
        announce(["http://a:1", "http://a:2"])
        seen.append(json.loads(file.read_text()))
        raise RunFailed("a ended")

    def build(site: EngineSite, keys: Keys) -> list[FakeServer]:
        told.append((site.local_ranks, site.logs))
        return []

    told: list[tuple[int, Path]] = []
    monkeypatch.setattr(SGLangFactory, "build_servers", build)
    monkeypatch.setattr(serve, "run_servers", run_both)
    with pytest.raises(RunFailed, match="a ended"):
        serve_engines(served(tmp_path), urls_file=file)
    assert seen == [False, ["http://a:1", "http://a:2"]]
    assert not file.exists()
    # There is no trainer here, and several machines share the folder.
    assert told == [(0, tmp_path / "test-engines" / socket.gethostname())]
    with pytest.raises(ConfigError, match="--urls-file: there is no folder"):
        serve_engines(served(tmp_path), urls_file=tmp_path / "none" / "urls.json")


def test_the_follower_knows_the_urls_and_ends_with_the_servers() -> None:
    told: list[str] = []

    async def follow(urls) -> None:
        told.extend(urls)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            told.append("ended before them" if not servers[0].stopped else "ended behind them")

    servers = [FakeServer("a")]
    run(servers, follow=[follow])
    assert told == ["http://a:4000", "ended before them"]
    assert servers[0].stopped


def test_servers_do_not_go_on_without_what_runs_beside_them() -> None:
    async def follow(urls) -> None:
        raise RunFailed("the shared folder is gone")

    servers = [FakeServer("a")]
    with pytest.raises(RunFailed, match="the shared folder is gone"):
        run(servers, follow=[follow])
    assert servers[0].stopped


@pytest.mark.parametrize(
    ("nodes", "rank", "head", "message"),
    [
        (1, 1, None, "--node-rank and --head are of an engine on several"),
        (1, 0, "a:1", "--node-rank and --head are of an engine on several"),
        (2, 2, "a:1", r"--node-rank: got 2, expected 0 to 1 \(--nodes 2\)"),
        (2, -1, "a:1", "--node-rank: got -1, expected 0 to 1"),
        (2, 0, None, "--head: got None, expected host:port"),
        (2, 0, "host", "--head: got 'host', expected host:port"),
        (2, 0, "host:70000", "--head: got 'host:70000', expected host:port"),
    ],
)
def test_a_machine_of_an_engine_is_refused(nodes, rank, head, message) -> None:
    with pytest.raises(UserError, match=message):
        node_of(nodes, rank, head)


def test_a_machine_of_an_engine() -> None:
    assert node_of(1, 0, None) is None
    assert node_of(4, 3, "10.0.0.7:20000") == EngineNode(4, 3, "10.0.0.7:20000")
    assert node_of(2, 0, "[fd00::1]:20000") == EngineNode(2, 0, "[fd00::1]:20000")


def test_engines_of_the_delta_transport_follow_a_folder(tmp_path) -> None:
    assert followers(served()) == []
    assert followers(served(transport="disk", weights_dir=str(tmp_path))) == []
    with pytest.raises(ConfigError, match=r"rollout\.engine\.weights_dir: not given"):
        followers(served(transport="delta"))
    [follow] = followers(served(transport="delta", weights_dir=str(tmp_path)))

    async def run() -> None:
        following = asyncio.ensure_future(follow(["http://a"]))
        while not (tmp_path / "followers").is_dir():
            await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.wait({following})

    asyncio.run(asyncio.wait_for(run(), 60))
