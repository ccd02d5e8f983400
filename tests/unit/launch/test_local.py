"""Signals that end ranks which do not handle them yet are no failure; ranks only sleep here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rlcore.config import Config
from rlcore.config.load import Loaded, load_config
from rlcore.errors import INTERRUPTED, RunFailed
from rlcore.launch import local
from rlcore.launch.environment import INTERFACE, RESOLVED
from rlcore.stores import loopback_interface

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded:
    given = ["run.name=a", f"run.dir={tmp_path}", "model.path=model", "data.paths=train.jsonl"]
    return load_config([], [*given, "training.steps=1", "cluster.processes_per_node=2"])


@pytest.fixture
def config(loaded: Loaded) -> Config:
    return loaded.config


def ask_to_end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Sleeping(subprocess.Popen[bytes]):
    """A Python that sleeps; it does by the time that this is made."""

    def __init__(self, before: str = "") -> None:
        program = f"import signal, time; {before or None}; print(flush=True); time.sleep(60)"
        command = [sys.executable, "-S", "-c", program]
        super().__init__(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.stdout is not None
        with self.stdout:
            self.stdout.readline()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_ranks_start_ends_the_run_as_asked(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    asking = threading.Timer(0.3, lambda: os.kill(os.getpid(), number))

    def start(rank: int, *_: object) -> subprocess.Popen[bytes]:
        worker = Sleeping()
        if rank == 1:  # signals are handled by now; before, this one would end the test
            asking.start()
        return worker

    monkeypatch.setattr(local, "_start", start)
    assert local.launch_ranks(loaded, []) == INTERRUPTED
    asking.join()


def test_a_rank_that_was_not_started_yet_gets_the_signal(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(rank: int, *_: object) -> subprocess.Popen[bytes]:
        if rank == 1:
            ask_to_end()
        return Sleeping()

    monkeypatch.setattr(local, "_start", start)
    began = time.monotonic()
    assert local.launch_ranks(loaded, []) == INTERRUPTED
    assert time.monotonic() - began < 30


def test_a_signal_while_ranks_are_ended_leaves_no_process(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 ignores SIGTERM."""
    asked: list[float | None] = []

    class Stubborn(Sleeping):
        def wait(self, timeout: float | None = None) -> int:
            if not asked:  # it has got its SIGTERM
                ask_to_end()
            asked.append(timeout)
            return super().wait(timeout)

    workers: list[subprocess.Popen[bytes]] = []

    def start(rank: int, *_: object) -> subprocess.Popen[bytes]:
        ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
        workers.append(subprocess.Popen(["false"]) if rank == 0 else Stubborn(ignores))
        return workers[-1]

    monkeypatch.setattr(local, "_start", start)
    monkeypatch.setattr(local, "LEAVE_S", 0.0)
    monkeypatch.setattr(local, "REPORT_GRACE_S", 0.0)
    monkeypatch.setattr(local, "END_RANK_S", 2.0)
    assert local.launch_ranks(loaded, []) == 1
    assert len(asked) == 2, "before SIGKILL and after it"
    assert workers[1].returncode == -signal.SIGKILL


def test_a_rank_that_others_kill_has_failed(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(rank: int, *_: object) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", "-c", "kill -TERM $$"] if rank == 1 else ["sleep", "0"])

    monkeypatch.setattr(local, "_start", start)
    with pytest.raises(RunFailed, match="rank 1 failed: it was killed by SIGTERM"):
        local.launch_ranks(loaded, [])


def test_ranks_take_the_configuration_from_a_file_that_the_launcher_has_written(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every user of the machine sees command lines, which are masked."""
    origins = {**loaded.origins, "rollout.engine.urls": "site.yaml:3"}
    config = loaded.config.model_copy(deep=True)
    config.rollout.engine.urls = ["http://user:hidden@host:1"]
    given = replace(loaded, config=config, origins=origins, warnings=("a note",))
    taken: list[Loaded] = []

    def start(command: list[str], env: dict[str, str], **_: object) -> subprocess.Popen[bytes]:
        assert command[-2:] == ["train", "rollout.engine.urls=(masked)"]
        path = Path(env[RESOLVED])
        assert path.parent.stat().st_mode & 0o777 == 0o700
        taken.append(Loaded.from_json(path.read_text()))
        return sleeping

    with Sleeping("import sys; sys.exit()") as sleeping:
        monkeypatch.setattr(local.subprocess, "Popen", start)
        settings = "rollout.engine.urls=['http://user:hidden@host:1']"
        assert local.launch_ranks(given, ["train", settings]) == 0
    assert taken == [given, given]


def test_ranks_of_one_machine_talk_over_loopback_unless_told_otherwise(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself gloo takes the address of the machine's name, which others reach."""
    interfaces: list[str | None] = []

    def start(_: list[str], env: dict[str, str], **__: object) -> None:
        interfaces.append(env.get(INTERFACE))

    monkeypatch.setattr(local.subprocess, "Popen", start)
    monkeypatch.delenv(INTERFACE, raising=False)
    local._start(0, 2, Path(), config, ["train", "a.yaml"])
    monkeypatch.setenv(INTERFACE, "eth7")
    local._start(0, 2, Path(), config, ["train", "a.yaml"])
    assert interfaces == [loopback_interface(), "eth7"]
