"""`rlcore engine CONFIG` with a real server: what it prints is enough for a trainer to connect,
before and after the server was killed; a signal ends it cleanly.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import server_kit
import yaml
from server_kit import gone

from rlcore.config.sections.rollout import EngineConfig
from rollout.asyncio_utils import LoopThread
from rollout.engines.child_process import members
from rollout.engines.factories import ADMIN_KEY, API_KEY, Keys
from rollout.engines.sglang.external import ExternalServer


@pytest.fixture
def command(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[str]]:
    """Run `rlcore engine CONFIG`. It and its server end with the test."""
    for name in (API_KEY, ADMIN_KEY):  # generated, whatever this machine's user has set
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "run.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "run": {"name": "alone", "dir": str(tmp_path / "runs")},
                "model": {"path": str(tiny_model), "dtype": "fp32"},
                "data": {"paths": "none.jsonl"},
                "training": {"steps": 1},
                "rollout": {"engine": server_kit.SETTINGS},
            }
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "rlcore", "engine", str(config)], stdout=subprocess.PIPE, text=True
    )
    yield process
    process.kill()
    process.wait()


def test_engines_alone_are_connected_by_what_the_command_prints(
    command: subprocess.Popen[str], tiny_model: Path, tmp_path: Path
) -> None:
    process = command
    assert process.stdout is not None
    deadline = threading.Timer(server_kit.START_S, process.kill)
    deadline.start()
    printed = []
    while line := process.stdout.readline():
        printed.append(line)
        if "rollout.engine.urls=" in line:
            break
    deadline.cancel()
    text = "".join(printed)
    keys_file = Path(re.findall(r"^  \. (\S+)$", text, re.MULTILINE)[0])
    assert keys_file.stat().st_mode & 0o777 == 0o600
    exported = dict(re.findall(r"export (\w+)=(\S+)", keys_file.read_text()))
    assert not any(key in text for key in exported.values())
    told = dict(word.split("=", 1) for word in shlex.split(printed[-1]) if "=" in word)
    [url] = json.loads(told["rollout.engine.urls"])
    engine = EngineConfig(kind="sglang", urls=[url])
    keys = Keys(exported[API_KEY], exported[ADMIN_KEY])
    external = ExternalServer("engine-0", url, str(tiny_model), config=engine, keys=keys)
    loop = LoopThread("connect")
    assert loop.call(external.start(), seconds=60, what="connecting") == url

    [killed] = psutil.Process(process.pid).children()
    killed.kill()
    killed.wait(20)
    assert gone(killed.pid)
    assert loop.call(external.start(), seconds=server_kit.START_S, what="connecting again") == url
    loop.close()

    [server] = psutil.Process(process.pid).children()
    assert len(members(server.pid)) >= 3
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert members(server.pid) == []
    assert not keys_file.exists()
    assert not (tmp_path / "runs" / "alone").exists()  # left for the trainer to make
