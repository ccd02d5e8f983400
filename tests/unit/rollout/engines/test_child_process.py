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

from rlcore.errors import DeadlineExceeded, RunFailed, UserError
from rollout.engines.child_process import END_BYTES, LINE_LENGTH, ChildServer, members

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


async def start(child: ChildServer, script: str, timeout_s: float = 20.0) -> int:
    return await child.launch(
        [sys.executable, "-c", script], lambda fd: str(fd).encode(), timeout_s=timeout_s
    )


@pytest.fixture
def child(tmp_path: Path) -> ChildServer:
    return ChildServer("e", tmp_path / "log")


def test_a_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(RunFailed, match=r"engine e cannot be started: .*logs"):
        asyncio.run(start(ChildServer("e", tmp_path / "logs" / "e.log"), READY))


@pytest.mark.parametrize("stopped", [False, True])
def test_kill_ends_the_whole_group(child: ChildServer, stopped: bool) -> None:
    async def scenario() -> None:
        assert await start(child, STUBBORN) == 7
        assert len(members(child.process.pid)) == 2
        if stopped:
            os.killpg(child.process.pid, signal.SIGSTOP)
        await child.kill()
        assert members(child.process.pid) == []
        assert child.describe_end().startswith("killed by SIGKILL")

    asyncio.run(scenario())


def test_what_a_process_leaves_behind_when_it_ends_by_itself_is_ended(child: ChildServer) -> None:
    async def scenario() -> None:
        await start(child, STUBBORN.replace("time.sleep(60)\n", "time.sleep(0.3)\n"))
        await asyncio.wait_for(child.ended, 10)
        deadline = time.monotonic() + 10
        while members(child.process.pid) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        assert members(child.process.pid) == []

    asyncio.run(scenario())


def test_it_is_asked_to_end_by_its_own_signal(tmp_path: Path) -> None:
    child = ChildServer("e", tmp_path / "log")
    child.stop_signal = signal.SIGINT
    # A shell starts what runs in its background deaf to SIGINT, and so everything below it.
    ready = READY + "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    script = (
        ready
        + "try:\n    ready('{\"port\": 1}\\n')\n    time.sleep(60)\nexcept KeyboardInterrupt:\n   "
        " sys.exit(3)"
    )

    async def scenario() -> None:
        await start(child, script)
        await child.stop()
        assert child.describe_end().startswith("exit code 3")

    asyncio.run(scenario())


def test_it_can_be_started_again(child: ChildServer) -> None:
    async def scenario() -> None:
        await start(child, STUBBORN)
        first = child.process.pid
        await child.kill()
        assert await start(child, STUBBORN) == 7
        assert child.process.pid != first
        assert not child.ended.done()
        await child.kill()

    asyncio.run(scenario())


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
        asyncio.run(child.launch([str(tmp_path / "python")], lambda fd: b"", timeout_s=5.0))
    assert child.ended is None


def test_of_a_long_log_the_end_is_read(child: ChildServer) -> None:
    child.log.write_bytes(b"first\n" + b"x" * END_BYTES + b"\n" + "läst\n".encode())
    assert child.last_words() == f"the end of its log {child.log}:\n  läst"
