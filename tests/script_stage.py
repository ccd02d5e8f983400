"""A stage for the shell scripts: stubs of srun, scontrol, ray and python record their calls."""

# The programs below are verbatim.
# ruff: noqa: E501

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.slurm_stubs import job, write_stubs

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("RLCORE_ENGINE_API_KEY", "RLCORE_ENGINE_ADMIN_KEY")
WAIT_S = 30.0

# `python`, as the scripts call it. Engines write their URLs and go on until they are ended, or end
# by themselves: at once (ENGINE_CODE), or a moment later on the nodes of LOST. On Ray the run waits
# for the nodes, elsewhere for TRAINER_S.
PYTHON = f"""#!{sys.executable} -S
import json, os, signal, sys, time
arguments = sys.argv[1:]
if arguments[0].endswith(".py"):
    os.execv({sys.executable!r}, [{sys.executable!r}, *arguments])
kept = {{name: os.environ.get(name) for name in ("NODE_RANK", "SLURM_PROCID", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "SITE", "IMAGE", *{KEYS!r})}}
def put(path, value):
    # Whole or not at all, as rlcore writes them: others look while this goes on.
    with open(f"{{path}}.new", "w") as file:
        json.dump(value, file)
    os.replace(f"{{path}}.new", path)
if "engine" in arguments:
    path = arguments[arguments.index("--urls-file") + 1]
    # Before anybody can know that this engine is there.
    signal.signal(signal.SIGTERM, lambda *_: (os.path.exists(path) and os.unlink(path), sys.exit(0)))
record = f"{{time.time_ns()}}-{{os.getpid()}}.json"
put(os.path.join(os.environ["RECORDS"], record), {{"arguments": arguments, "environment": kept, "pid": os.getpid()}})
if "engine" in arguments:
    if "ENGINE_CODE" in os.environ:
        sys.exit(int(os.environ["ENGINE_CODE"]))
    node = os.path.basename(path)[:-5]
    put(path, [f"http://{{node}}:30000"])
    while not (node in os.environ.get("LOST", "").split() and os.path.exists(os.path.join(os.environ["RECORDS"], "training"))):
        time.sleep(0.1)
    sys.exit(5)
if "rlcore.launch.torchrun" in arguments:
    open(os.path.join(os.environ["RECORDS"], "training"), "w").close()
    time.sleep(float(os.environ.get("TRAINER_S", "0")))
if "cluster.launcher=ray" in arguments:
    nodes = os.environ.get("NODES", "1").split()
    said = os.path.join(os.environ["RECORDS"], "ray.txt")
    while open(said).read().count("start --block") < (len(nodes) - 1) * (1 + int(os.environ.get("SLURM_RESTART_COUNT", "0"))):
        time.sleep(0.05)
sys.exit(int(os.environ.get("TRAINER_CODE", "0")))
"""
# One head at a time: there while its file is. What joins it stays as long. A check that is slow
# takes Ctrl-C for an answer.
RAY = """#!/usr/bin/env bash
echo "$*" >> "$RECORDS/ray.txt"
case "$1 $2" in
    health-check*)
        if [ -n "${SLOW:-}" ]; then trap 'exit 1' INT; touch "$RECORDS/checking"; command -p sleep 5 & wait; fi
        [ -e "$RECORDS/head" ]
        ;;
    "start --head") touch "$RECORDS/head"; trap 'rm "$RECORDS/head"; exit' TERM; while :; do sleep 0.1; done ;;
    "start --block") [ -z "${REFUSED:-}" ] || exit 7; while [ -e "$RECORDS/head" ]; do sleep 0.1; done; exit 1 ;;
esac
"""
# Nobody needs the time that a script gives to others.
SLEEP = """#!/usr/bin/env bash
command -p sleep 0.1
"""


@dataclass
class Stage:
    """A folder of stubs, and what they wrote down."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        write_stubs(self.folder)
        for name, text in {"python": PYTHON, "ray": RAY, "sleep": SLEEP}.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        self.records = self.folder / "records"
        self.records.mkdir()
        # A checkout of its own: what the jobs write lands there.
        shutil.copytree(ROOT / "scripts", self.folder / "checkout" / "scripts")
        kept = {
            name: value for name, value in os.environ.items()
            if name not in KEYS and not name.startswith(("SLURM_", "RAY_AUTH_"))
        }  # fmt: skip
        self.environment = {
            **kept,
            "HOME": str(self.folder),
            "PATH": f"{self.folder}:{os.environ['PATH']}",
            "RECORDS": str(self.records),
            "PYTHON": str(self.folder / "python"),
            **self.environment,
        }

    def script(self, name: str) -> str:
        return str(self.folder / "checkout" / "scripts" / name)

    def run(
        self, script: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.script(script), *arguments], env={**self.environment, **environment},
            cwd=self.folder / "checkout", capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def sbatch(
        self, script: str, nodes: int, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return self.run(f"slurm/{script}", *arguments, **job(nodes), **environment)

    def calls(self, word: str) -> list[dict[str, Any]]:
        """How the interpreter was called with `word` among its arguments, by the node's rank."""
        found = [json.loads(path.read_text()) for path in self.records.glob("*.json")]
        chosen = [call for call in found if word in call["arguments"]]
        ranks = ("SLURM_PROCID", "NODE_RANK")
        return sorted(
            chosen, key=lambda call: [int(call["environment"][name] or 0) for name in ranks]
        )

    def start(self, script: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
        """In a process group of its own, which Ctrl-C reaches wherever the tests are run."""
        process = subprocess.Popen(
            [self.script(script), *arguments],
            env={**self.environment, **environment},
            start_new_session=True,
            cwd=self.folder / "checkout",
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        """End what was started and goes on, as behind a test that failed."""
        for process in self._started:
            with suppress(ProcessLookupError):  # its group is gone
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait_until_it_waits(self, process: subprocess.Popen[bytes]) -> None:
        """Until a script that has started its last program waits for it, its traps set."""
        script = psutil.Process(process.pid)
        self.wait_for(lambda: script.status() == psutil.STATUS_SLEEPING, "the script works on")

    def wait_for(self, seen: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not seen():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)


def value_of(arguments: list[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]
