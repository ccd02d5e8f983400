"""`rlcore engine --join RUN`: the configuration of its engines, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rlcore import cli
from rlcore.config import Config
from rlcore.config.sections.rollout import RestartConfig
from rlcore.errors import ConfigError, UserError
from rlcore.launch.commands.engine import join_run, joining_config, run_servers
from rlcore.runs.directory import RunDirectory
from rollout.fleet.announcements import EngineFolder


def make_run(folder: Path, **engine: object) -> Path:
    """The folder of a run on SGLang."""
    config = Config.model_validate(
        {
            "run": {"name": "grows", "dir": str(folder)},
            "model": {"path": "model"},
            "data": {"paths": "train.jsonl"},
            "training": {"steps": 1},
            "rollout": {"engine": {"kind": "sglang", **engine}},
        }
    )
    run = RunDirectory.create(folder, "grows")
    run.write_config(config.model_dump(mode="json"))
    run.close()
    EngineFolder.of(run.path).make()
    return run.path


def test_what_tells_of_the_run_s_own_machines_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path, count=3, gpus=[1, 2, 3], host="10.0.0.1", threads=2)
    engine = joining_config(run, [], []).rollout.engine
    assert (engine.count, engine.gpus, engine.host, engine.threads) == (1, [], "127.0.0.1", 2)
    servers = tmp_path / "servers.yaml"
    servers.write_text("rollout: {engine: {count: 2, gpus: [4, 5]}}\n")
    engine = joining_config(run, [servers], ["rollout.engine.host=10.0.0.2"]).rollout.engine
    assert (engine.count, engine.gpus, engine.host) == (2, [4, 5], "10.0.0.2")


def test_the_run_s_engines_may_be_given_by_url(tmp_path: Path) -> None:
    run = make_run(tmp_path, urls=["http://10.0.0.1:4000"])
    engine = joining_config(run, [], ["rollout.engine.count=2"]).rollout.engine
    assert (engine.urls, engine.count) == ([], 2)


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        ({"kind": "embedded"}, "its rollout.engine.kind is 'embedded', and `rlcore engine` starts"),
        ({"colocated": True}, "its engines take turns with the trainer"),
        (
            {"urls": ["http://a:1"], "router_url": "http://b:1"},
            "its requests go through rollout.engine.router_url, which would not know the engine",
        ),
    ],
)
def test_runs_that_no_engine_can_join(tmp_path: Path, engine: dict[str, object], why: str) -> None:
    run = make_run(tmp_path, **engine)
    with pytest.raises(UserError, match=f"no engine can join {run}: {why}"):
        joining_config(run, [], [])


def test_a_secret_of_the_engines_must_be_given_again(tmp_path: Path) -> None:
    run = make_run(tmp_path, environment={"HF_TOKEN": "hf_of_this_test"})
    with pytest.raises(ConfigError, match=r"environment\.HF_TOKEN.*give the value again"):
        joining_config(run, [], [])
    given = joining_config(run, [], ["rollout.engine.environment.HF_TOKEN=other"])
    assert given.rollout.engine.environment == {"HF_TOKEN": "other"}


def test_a_folder_that_is_no_run_and_a_run_that_has_finished(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no run takes engines there.*the folder of a run"):
        join_run(tmp_path, [], [])
    run = make_run(tmp_path)
    RunDirectory(run).write_result("completed", 3)
    with pytest.raises(UserError, match="grows has finished"):
        join_run(run, [], [])


def test_a_run_that_has_not_begun_to_take_engines(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    EngineFolder.of(run).path.rmdir()
    assert cli.main(["engine", "--join", str(run)]) == 2


class Quick:
    """A server that starts at once."""

    name = "a"
    ended: asyncio.Future[int] | None = None

    async def start(self, port: int = 0) -> str:
        self.ended = asyncio.get_running_loop().create_future()
        return "http://a:4000"

    async def stop(self) -> None:
        LEFT.append("stopped")


LEFT: list[str] = []


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_leaves_the_run_before_the_servers_end_and_a_second_one_does_not_wait(
    signals: int,
) -> None:
    LEFT.clear()

    async def leave() -> None:
        LEFT.append("leaving")
        for _ in range(signals - 1):
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05 if signals == 1 else 60)
        LEFT.append("left")

    serving = run_servers(
        [Quick()],  # type: ignore[list-item]
        lambda _: os.kill(os.getpid(), signal.SIGTERM),
        restart=RestartConfig(),
        leave=leave,
    )
    asyncio.run(asyncio.wait_for(serving, 10))
    expected = ["leaving", "left", "stopped"] if signals == 1 else ["leaving", "stopped"]
    assert expected == LEFT


def test_the_end_of_the_run_ends_the_command_and_its_refusal_too() -> None:
    async def finished(_urls: object) -> None:
        return

    async def refused(_urls: object) -> None:
        raise UserError("no")

    async def forever(_urls: object) -> None:
        await asyncio.Event().wait()

    def serve(*follow: object) -> None:
        serving = run_servers([Quick()], lambda _: None, follow, restart=RestartConfig())  # type: ignore[arg-type,list-item]
        asyncio.run(asyncio.wait_for(serving, 10))

    serve(forever, finished)
    with pytest.raises(UserError, match="no"):
        serve(forever, refused)
