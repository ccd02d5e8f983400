"""Reward functions that do what they should not. Imported by worker processes: light."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlcore.data.sample import Sample

NOTES: list[str] = []


def environment(sample: Sample) -> dict[str, Any]:
    return {"score": 1, "info": {"names": sorted(os.environ)}}


def reads_stdin(sample: Sample) -> dict[str, Any]:
    return {
        "score": 1,
        "info": {"read": sys.stdin.read(), "lowest": os.readlink("/proc/self/fd/0")},
    }


def leaves_processes(sample: Sample) -> dict[str, Any]:
    """Leave a sleeper in its own session, and a daemon that outlived two parents."""
    sleeper = subprocess.Popen(["setsid", "sleep", "77"], stdout=subprocess.PIPE)
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            aside = Path(sample.metadata["folder"], "aside")
            aside.write_text(str(os.getpid()))
            aside.rename(aside.with_name("daemon"))  # whole as soon as it is there
            time.sleep(77)
        os._exit(0)
    os.wait()
    while not Path(sample.metadata["folder"], "daemon").exists():
        time.sleep(0.01)
    daemon = int(Path(sample.metadata["folder"], "daemon").read_text())
    return {"score": 1, "info": {"pids": [sleeper.pid, daemon]}}


def hangs_with_children(sample: Sample) -> float:
    leaves = leaves_processes(sample)
    Path(sample.metadata["folder"], "pids").write_text(json.dumps(leaves["info"]["pids"]))
    time.sleep(600)
    return 1.0


def oom_score(sample: Sample) -> float:
    return float(Path("/proc/self/oom_score_adj").read_text())


def waits_for_a_file(sample: Sample) -> float:
    """Score the length of the text, once it may."""
    Path(sample.metadata["folder"], "begun").touch()
    while not Path(sample.metadata["folder"], "go").exists():
        time.sleep(0.01)
    return float(len(sample.response_text))


def child_sees(sample: Sample) -> dict[str, Any]:
    """A child that is forked, and one that executes, look for descriptors."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(_sockets()).encode())
        os._exit(0)
    os.wait()
    forked = json.loads(os.read(read, 10000))
    code = "import os; os.system('ls -l /proc/self/fd')"
    executed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, close_fds=False, check=True
    )
    return {"score": 1, "info": {"forked": forked, "executed": executed.stdout}}


def _sockets() -> list[str]:
    found = []
    for fd in range(3, 1000):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return [name for name in found if name.startswith("socket")]


def writes_to_every_descriptor(sample: Sample) -> float:
    """Write an answer with a better score, or rubbish, into whatever is open."""
    if sample.response_text == "good":
        return 0.5
    frames = {
        "forged": json.dumps({"id": "0" * 16, "score": 99.0}).encode(),
        "rubbish": b"\x80\x05cposix\nsystem\n",
        "list": b"[1]",
    }
    payload = frames.get(sample.response_text, b"")
    frame = struct.pack("<I", len(payload)) + payload
    if sample.response_text == "huge":
        frame = struct.pack("<I", 1 << 31)
    for fd in range(3, 1000):
        try:
            os.write(fd, frame)
        except OSError:
            continue
    time.sleep(0.5)
    return 0.5


def eats_memory(sample: Sample) -> float:
    if sample.response_text == "eat":
        return float(len(bytearray(1 << 30)))
    return 1.0


def exits(sample: Sample) -> float:
    sys.exit("I give up")


def prints(sample: Sample) -> float:
    os.write(1, b"x" * 50_000_000)
    return 1.0


def unprintable(sample: Sample) -> float:
    raise ValueError("half a character: \ud800")


class Counter:
    """Is constructed once, with arguments, and keeps a process of its own."""

    def __init__(self, start: int) -> None:
        self.count = start
        self.helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __call__(self, sample: Sample) -> float:
        self.count += 1
        assert self.helper.stdin is not None
        assert self.helper.stdout is not None
        self.helper.stdin.write(b"%d\n" % self.count)
        self.helper.stdin.flush()
        return float(self.helper.stdout.readline())


def dies_but_a_child_keeps_the_socket(sample: Sample) -> float:
    import ctypes

    if ctypes.CDLL(None).fork() == 0:  # without Python's handlers
        time.sleep(40)
        os._exit(0)
    os._exit(9)


def dies_and_leaves_a_child(sample: Sample) -> float:
    child = subprocess.Popen(["sleep", "77"])
    Path(sample.metadata["folder"], "child").write_text(str(child.pid))
    os._exit(9)
