"""`benchmarks/gpu.py` with sections that fail: python failing_sections.py --toy --json FILE"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
from one_gpu.section import Found, Section, Setting

NAMES = ("works", "raises", "hangs", "is killed", "looks back")


def works(setting: Setting) -> Found:
    found = Found()
    found.check("a check", 0.5, 1.0)
    found.number("a number", 7.0, "s")
    return found


def raises(setting: Setting) -> Found:
    raise ValueError("on purpose")


def hangs(setting: Setting) -> Found:
    if "PID_FILE" in os.environ:
        Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
    time.sleep(3600)
    return Found()


def is_killed(setting: Setting) -> Found:
    os.kill(os.getpid(), signal.SIGKILL)
    return Found()


def looks_back(setting: Setting) -> Found:
    """Find what the file holds while the last section runs."""
    found = Found()
    report = json.loads(Path(sys.argv[sys.argv.index("--json") + 1]).read_text())
    found.numbers["before"] = list(report["sections"])
    found.numbers["written"] = report["sections"]["works"]["numbers"]
    return found


def sections(*, toy: bool) -> list[Section]:
    assert toy
    limits = {"hangs": float(os.environ.get("HANGS_S", "3"))}
    return [
        Section(name, f"failing_sections:{name.replace(' ', '_')}", limits.get(name, 600.0))
        for name in NAMES
    ]


if __name__ == "__main__":
    gpu.sections = sections
    sys.exit(gpu.main())
