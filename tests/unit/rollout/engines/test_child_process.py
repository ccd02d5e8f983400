"""A process of ours and all it started: whoever ends first, none is left. Small Python scripts
instead of servers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rlcore.config.sections.rollout import EngineConfig
from rlcore.errors import DeadlineExceeded, RunFailed, UserError
from rollout.engines.child_process import (
    END_BYTES,
    LINE_LENGTH,
    ChildServer,
    engine_environment,
    members,
    with_this_checkout,
)

READY = (
    "import json, os, subprocess, sys, time\nfd = int(sys.stdin.read())\nready = lambda line:"
    " os.write(fd, line.encode())\n"
)
# Ignores SIGTERM, and has a child which does too.
STUBBORN = (
    READY
    + """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", child])
ready('{"port": 7}\\n')
time.sleep(60)
"""
)


# what our own launch, torchrun and a tuned trainer set
OF_THE_TRAINER = {
    "RANK": "3",
    "TORCHELASTIC_RUN_ID": "x",
    "NCCL_ALGO": "Ring",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}


def test_an_engine_does_not_inherit_what_is_for_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_the_site = {"NCCL_SOCKET_IFNAME": "eth1", "HF_HUB_OFFLINE": "1"}
    for name, value in (OF_THE_TRAINER | of_the_site | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    on_gpu = engine_environment(EngineConfig(), on_gpu=True, gpus=["4", "5"])
    assert not (OF_THE_TRAINER.keys() | {"OMP_NUM_THREADS"}) & on_gpu.keys()
    assert of_the_site.items() <= on_gpu.items()
    assert on_gpu["CUDA_VISIBLE_DEVICES"] == "4,5"
    # on a CPU engines and trainer share the cores
    on_cpu = engine_environment(EngineConfig(), on_gpu=False)
    assert not OF_THE_TRAINER.keys() & on_cpu.keys()
    assert on_cpu["OMP_NUM_THREADS"] == "1"


def test_an_engine_gets_what_the_user_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    given = {"NCCL_ALGO": "Tree", "OMP_NUM_THREADS": "4", "PYTHONPATH": "/mine"}
    variables = engine_environment(EngineConfig(environment=given), on_gpu=True)
    assert given.items() <= variables.items()
    assert with_this_checkout(variables)["PYTHONPATH"].endswith(f"{os.pathsep}/mine")


async def start(child: ChildServer, script: str, timeout_s: float = 20.0) -> int:
    return await child.launch(
        [sys.executable, "-c", script],
        lambda fd: str(fd).encode(),
        timeout_s=timeout_s,
        environment=os.environ,
    )


@pytest.fixture
def child(tmp_path: Path) -> ChildServer:
    return ChildServer("e", tmp_path / "log")


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(RunFailed, match=r"engine e cannot be started: .*logs"):
        asyncio.run(start(ChildServer("e", tmp_path / "logs" / "e.log"), READY))


@pytest.mark.parametrize("stopped", [False, True])
async def test_kill_ends_the_whole_group(child: ChildServer, stopped: bool) -> None:
    assert await start(child, STUBBORN) == 7
    assert len(members(child.process.pid)) == 2
    if stopped:
        os.killpg(child.process.pid, signal.SIGSTOP)
    await child.kill()
    assert members(child.process.pid) == []
    assert child.describe_end().startswith("killed by SIGKILL")


async def test_what_a_process_leaves_behind_when_it_ends_by_itself_is_ended(
    child: ChildServer,
) -> None:
    await start(child, STUBBORN.replace("time.sleep(60)\n", "time.sleep(0.3)\n"))
    await asyncio.wait_for(child.ended, 10)
    deadline = time.monotonic() + 10
    while members(child.process.pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert members(child.process.pid) == []


async def test_it_is_asked_to_end_by_its_own_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.engines.child_process.TERMINATE_S", 60.0)
    child = ChildServer("e", tmp_path / "log")
    child.stop_signal = signal.SIGINT
    # A shell starts what runs in its background deaf to SIGINT, and so everything below it.
    ready = READY + "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script = (
        ready
        + "try:\n    ready('{\"port\": 1}\\n')\n    time.sleep(60)\nexcept KeyboardInterrupt:\n   "
        " sys.exit(3)"
    )

    await start(child, script)
    await child.stop()
    assert child.describe_end().startswith("exit code 3")


async def test_it_can_be_started_again(child: ChildServer) -> None:
    await start(child, STUBBORN)
    first = child.process.pid
    await child.kill()
    assert await start(child, STUBBORN) == 7
    assert child.process.pid != first
    assert not child.ended.done()
    await child.kill()


@pytest.mark.parametrize("alive", [True, False])
async def test_a_process_that_waits_for_its_input_is_the_one_that_serves(
    child: ChildServer, alive: bool
) -> None:
    """If it ends before it gets its input, another one is started, whose log says why."""
    command = [sys.executable, "-c", STUBBORN if alive else "raise SystemExit('no memory')"]
    await child.spawn(command, os.environ, asyncio.subprocess.DEVNULL)
    first = child.process.pid
    if not alive:
        await child.ended
        with pytest.raises(RunFailed, match=r"(?s)ended before it was ready.*no memory"):
            await child.launch(command, lambda fd: b"", timeout_s=30.0, environment=os.environ)
        assert child.process.pid != first
        return
    assert await start(child, STUBBORN) == 7
    assert child.process.pid == first
    await child.kill()
    assert members(first) == []


async def test_a_process_that_never_gets_its_input_is_ended_too(child: ChildServer) -> None:
    await child.spawn([sys.executable, "-c", STUBBORN], os.environ, asyncio.subprocess.DEVNULL)
    await child.stop()
    assert members(child.process.pid) == []


def test_what_it_reports_as_wrong_is_the_users_error(child: ChildServer) -> None:
    script = READY + 'ready(\'{"error": "no argument x; did you mean y?"}\\n\')\ntime.sleep(60)'
    with pytest.raises(UserError, match=r"engine e: no argument x; did you mean y\?"):
        asyncio.run(start(child, script))
    assert members(child.process.pid) == []


def test_an_early_end_shows_the_log_in_lines_of_readable_length(child: ChildServer) -> None:
    script = f"print('x' * {LINE_LENGTH * 3}); raise SystemExit('no memory')"
    with pytest.raises(
        RunFailed, match="ended before it was ready: exit code 1; the end of its log"
    ) as error:
        asyncio.run(start(child, script))
    assert "no memory" in str(error.value)
    assert "x" * LINE_LENGTH + " ..." in str(error.value)
    assert "x" * (LINE_LENGTH + 1) not in str(error.value)


def test_one_that_is_late_is_ended(child: ChildServer) -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"not ready within 0\.5 s \(rollout\.engine\.start_timeout_s\)"
    ):
        asyncio.run(start(child, STUBBORN.replace("ready('", "# ready('"), timeout_s=0.5))
    assert members(child.process.pid) == []


def test_what_cannot_be_run_is_said_with_its_name(child: ChildServer, tmp_path: Path) -> None:
    (tmp_path / "python").touch()  # not executable
    with pytest.raises(RunFailed, match=r"engine e cannot be started: .*Permission denied.*python"):
        asyncio.run(
            child.launch([str(tmp_path / "python")], lambda fd: b"", timeout_s=5.0, environment={})
        )
    assert child.ended is None


def test_of_a_long_log_the_end_is_read(child: ChildServer) -> None:
    child.log.write_bytes(b"first\n" + b"x" * END_BYTES + b"\n" + "läst\n".encode())
    assert child.last_words() == f"the end of its log {child.log}:\n  läst"
