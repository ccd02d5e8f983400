"""A checkout whose interpreter makes environments of itself and writes down what pip is to do."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# "-m venv" makes an environment whose interpreter is this file. Of pip's work the arguments are
# written down and the requirements; FAIL is a package at which pip fails, with $SAYS.
INTERPRETER = r"""#!/bin/sh
case "$*" in
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip install "*)
        echo "pip NVTE=$NVTE_PYTORCH_FORCE_BUILD $*" >> "$CALLS"
        [ -z "$CUDA_HOME" ] || echo "# $CUDA_HOME $CPLUS_INCLUDE_PATH" >> "$CALLS"
        for list in "$@"; do :; done
        case "$*" in *" -r "*) cat "$list" >> "$CALLS" ;; esac
        if [ -n "$FAIL" ] && grep -q "$FAIL" "$list"; then echo "$SAYS" >&2; exit 1; fi ;;
    *--version*) echo 0.5.23 ;;
    *purelib*) echo /site ;;
esac
"""


class Checkout:
    """A copy of the scripts, and what each run of them asks pip for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "scripts", folder / "scripts")
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.python = folder / "python"
        self.python.write_text(INTERPRETER)
        self.python.chmod(0o755)

    def run(self, script: str, *arguments: str, **variables: str) -> tuple[list[str], str, int]:
        """The calls of pip with their requirements, what was said, the exit status."""
        calls = self.folder / "calls"
        calls.write_text("")
        done = subprocess.run(
            ["bash", str(self.folder / "scripts" / script), *arguments],
            env={
                "PATH": os.pathsep.join(["/usr/bin", "/bin"]),  # without uv
                "PYTHON": str(self.python),
                "CALLS": str(calls),
                **variables,
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return calls.read_text().split("pip NVTE=")[1:], done.stdout + done.stderr, done.returncode

    def installs(self, script: str, *arguments: str, **variables: str) -> list[str]:
        calls, said, code = self.run(script, *arguments, **variables)
        assert code == 0, said
        return calls


def packages(call: str) -> dict[str, str]:
    """What a call of pip was given: versions by name."""
    lines = [line.split(" ")[0] for line in call.splitlines()[1:] if line[:1].isalnum()]
    return {line.partition("=")[0]: line.partition("=")[2].lstrip("=") for line in lines}
