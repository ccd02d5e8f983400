"""Queries an interpreter in a child process for its packages. Works without torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcore.boundary.child_environment import ENGINES, allowed_environment
from rlcore.deadlines import INTERPRETER_S
from rlcore.interpreters import probe

CHECKOUT = Path(__file__).resolve().parents[2]
USUAL_TOOLKIT = "/usr/local/cuda"

PROBE = Path(probe.__file__)


@dataclass(frozen=True)
class Interpreter:
    """The answer of an interpreter.

    Attributes:
        packages: versions of the requested packages that are installed, by name.
        cuda, nccl: "" where torch has none.
        te: whether Transformer Engine can be imported; None: not checked.
        uncompiled: why torch.compile cannot work; "" where it can, or was not checked.
        broken: why the interpreter, or its torch, does not work; "" where both work.
    """

    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    torch: str = ""
    cuda: str = ""
    gpus: int = 0
    nccl: str = ""
    te: bool | None = None
    uncompiled: str = ""
    kernels_broken: str = ""
    broken: str = ""


def ask(python: Path | str, packages: list[str], *, module: str | None = None) -> Interpreter:
    """Ask an interpreter for the versions of `packages`, torch and NCCL.

    Args:
        module: a module of rlcore to run instead of the probe, by rlcore's own interpreter.
    """
    script = [str(PROBE)] if module is None else ["-m", module]
    command = [str(python), "-W", "ignore", *script, json.dumps(packages)]
    environment = allowed_environment(more=(*ENGINES, "NVTE_*"))
    environment.pop("PYTHONPATH", None)
    if module is not None:
        paths = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=INTERPRETER_S,
            env=environment,
            check=False,
        )
    except OSError as error:
        return Interpreter(broken=f"it cannot be run: {error.strerror or error}")
    except subprocess.TimeoutExpired:
        return Interpreter(broken=f"it did not answer within {INTERPRETER_S:g} s")
    try:
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return Interpreter(**answer)
    except (ValueError, TypeError, IndexError):
        output = done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        return Interpreter(broken=f"exit code {done.returncode}: {output[0]}")


def cuda_toolkit(variables: Mapping[str, str]) -> str | None:
    """Return the CUDA toolkit's folder that a process with these variables finds, or None."""
    given = variables.get("CUDA_HOME") or variables.get("CUDA_PATH")
    if given:
        return given
    compiler = shutil.which("nvcc", path=variables.get("PATH"))
    if compiler is not None:
        return str(Path(compiler).parent.parent)
    return USUAL_TOOLKIT if os.path.exists(USUAL_TOOLKIT) else None
