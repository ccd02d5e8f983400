"""The rollout service in a process of its own: the same run, whatever dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.integration.held_estimator import held
from tests.integration.workspace import LEARNING, OF_ENGINES, Run, Workspace, learned
from tests.process_facts import command_of

STEPS = 12
SERVERS = ("rollout.service=process", *LEARNING, f"training.steps={STEPS}")
REACH_S = 300.0
SILENCE_S = 30.0


def assert_same(run: Run, inside: Run) -> None:
    """Metrics but for those of clocks and lost processes, and weights."""
    assert learned(run.metrics, without=OF_ENGINES) == learned(inside.metrics, without=OF_ENGINES)
    assert run.exported.read_bytes() == inside.exported.read_bytes()


@pytest.fixture(scope="module")
def inside(workspace: Workspace) -> Run:
    """The run whose service is in the process of rank 0."""
    run = workspace.train("inside", *SERVERS, "rollout.service=in_process")
    assert run.code == 0, run.err
    return run


def service_of(parent: int) -> psutil.Process:
    """The child of that name: a process that it starts bears its name too, until it is loaded."""
    [service] = [
        child
        for child in psutil.Process(parent).children()
        if "rlcore.launch.service.child" in command_of(child)
    ]
    return service


def at_step(folder: Path, step: int, act: Callable[[], None]) -> threading.Thread:
    """Do `act` once the log has `step`."""

    def wait() -> None:
        path = folder / "metrics.jsonl"
        deadline = time.monotonic() + REACH_S
        while not path.exists() or path.read_text().count("\n") < step:
            assert time.monotonic() < deadline, f"no step {step}"
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.everyday
def test_a_run_with_the_service_beside_it_is_the_same(workspace: Workspace, inside: Run) -> None:
    run = workspace.train("beside", *SERVERS)
    assert run.code == 0, run.err
    assert_same(run, inside)
    assert (run.folder / "logs" / "service.log").exists()
    assert (run.folder / "timeline" / "service.json.gz").exists()
    assert not [
        child for child in psutil.Process().children(recursive=True)
        if "rlcore" in " ".join(command_of(child))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.full)]
)
def test_a_service_that_dies_or_hangs_is_made_anew(
    workspace: Workspace, inside: Run, how: signal.Signals, tmp_path: Path
) -> None:
    folder = workspace.folder / "runs" / how.name
    acted = tmp_path / "acted"
    struck: list[int] = []

    def strike() -> None:
        service = service_of(os.getpid())
        struck.append(service.pid)
        service.send_signal(how)
        acted.touch()

    at_step(folder, 3, strike)
    silence = f"cluster.heartbeat_timeout_s={SILENCE_S}"
    run = workspace.train(how.name, *SERVERS, silence, held(folder, {acted: 6}))
    assert run.code == 0, run.err
    assert struck
    assert not psutil.pid_exists(struck[0])
    assert_same(run, inside)
    assert run.lines("the rollout service died: another process replaces it")


def test_bad_input_that_the_service_finds_is_said_as_ever(workspace: Workspace) -> None:
    run = workspace.train("bad", *SERVERS, "rollout.filters=[nowhere:nothing]")
    assert run.code == 2, run.err
    [line] = run.err.splitlines()
    assert line.startswith("rlcore: rollout.filters.0 (override): function 'nowhere:nothing'")


def test_nothing_is_left_of_a_rank_0_that_is_killed(workspace: Workspace) -> None:
    folder = workspace.folder / "runs" / "orphans"
    command = [
        sys.executable, "-m", "rlcore", "train", str(workspace.base), "run.name=orphans", *SERVERS,
        "training.steps=100000",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as rank_0:
        family: list[psutil.Process] = []

        def kill() -> None:
            family.extend(psutil.Process(rank_0.pid).children(recursive=True))
            rank_0.kill()

        at_step(folder, 2, kill).join(REACH_S)
    assert len(family) >= 2, "the service and its engine"
    _, left = psutil.wait_procs(family, timeout=60)
    assert left == []
