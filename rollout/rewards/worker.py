"""The worker process of the reward pool: `python -m rollout.rewards.worker`.

It exchanges frames over its standard streams: 4 bytes of length, then a pickle. First it gets its
set-up ({"functions": {part: (import path, arguments)}, "sys_path": [...]}) and answers None or an
error text; then, for each (part, sample), it answers with a `Verdict` or a `RewardFailure`.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from rollout.rewards.base import Score

HEADER = struct.Struct("<I")


def pack(message: object) -> bytes:
    """The message as a frame."""
    payload = pickle.dumps(message, protocol=5)
    return HEADER.pack(len(payload)) + payload


def receive(stream: BinaryIO) -> Any:
    """The next message. Raises EOFError when the parent is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return pickle.loads(stream.read(HEADER.unpack(header)[0]))


def main() -> None:
    """Serve calls until the parent is gone."""
    die_with_parent()
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    # prints of a reward function go to the log, not into the frames
    os.dup2(2, 1)
    try:
        setup = receive(requests)
        functions = load_functions(setup, answers)
        while functions:
            part, sample = receive(requests)
            answers.write(pack(call(functions[part], sample)))
            answers.flush()
    except EOFError:
        return


def load_functions(setup: dict[str, Any], answers: BinaryIO) -> dict[str, Callable[..., Any]]:
    """The functions by part; {} after telling the parent why there are none."""
    from rlcore.errors import ConfigError
    from rollout.rewards.loading import load_function

    sys.path[:] = setup["sys_path"]
    problem: str | None = None
    functions: dict[str, Callable[..., Any]] = {}
    try:
        for part, (path, args) in setup["functions"].items():
            functions[part] = load_function(path, args, key=f"reward.parts.{part}.function")
    except ConfigError as error:
        problem = str(error)
        functions = {}
    answers.write(pack(problem))
    answers.flush()
    return functions


def call(function: Callable[..., Any], sample: Any) -> Score:
    """Return the function's verdict, or its failure."""
    from rollout.rewards.loading import scored

    return scored(function, sample)


def die_with_parent() -> None:
    """Have the kernel end this process when its parent is killed, even in an endless call."""
    if sys.platform == "linux":
        import ctypes
        import signal

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
