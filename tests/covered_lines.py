"""Records which lines of the product this process and its children run, one "file:line" a line.

The environment names the file (RECORD_LINES) and the root of the product (RECORD_ROOT). Each line
is written when it is first run, so that a process which is killed has told all. Children record
where their interpreter finds a `sitecustomize` that calls `start`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from types import CodeType, FrameType
from typing import Any

PACKAGES = ("rlcore", "rollout", "backends")
MOST_IDLE = 2_000  # lines of a function that were seen before


def start() -> None:
    """Trace this process, all of its threads and the processes that it forks."""
    root = os.environ["RECORD_ROOT"] + os.sep
    folders = tuple(f"{root}{package}{os.sep}" for package in PACKAGES)
    output = os.open(os.environ["RECORD_LINES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    unseen: dict[CodeType, set[int]] = {}
    idle: Counter[CodeType] = Counter()

    def lines_of(code: CodeType) -> set[int]:
        if not code.co_filename.startswith(folders):
            return set()
        return {line for _, _, line in code.co_lines() if line is not None}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        left = unseen.get(code)
        if left is None:
            left = unseen[code] = lines_of(code)
        if event == "line" and frame.f_lineno in left:
            left.discard(frame.f_lineno)
            os.write(output, f"{code.co_filename[len(root) :]}:{frame.f_lineno}\n".encode())
        elif event == "line":
            idle[code] += 1
            if idle[code] == MOST_IDLE:  # a hot loop, which tracing makes slow
                left.clear()
        return trace if left else None

    threading.settrace(trace)
    sys.settrace(trace)


if __name__ == "sitecustomize" and "RECORD_LINES" in os.environ:
    start()
