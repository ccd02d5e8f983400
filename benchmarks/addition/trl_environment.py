"""Makes a virtual environment with TRL, on the torch and transformers that run rlcore."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from process import run

TRL_VERSION = "1.16.0"
INSTALL_DEADLINE_S = 1800.0


def ensure(folder: Path, log: Path) -> Path:
    """Make the environment unless it exists, with pip's output in `log`. Returns its Python.

    pip takes torch from wherever it is configured to. Where that would be a CUDA build,
    PIP_EXTRA_INDEX_URL can name the index of the CPU builds; GPUs are hidden from the benchmark
    either way.
    """
    python = folder / "bin" / "python"
    pins = {
        "torch": version("torch").split("+")[0],
        "transformers": version("transformers"),
        "trl": TRL_VERSION,
    }
    if _installed(python) == pins:
        return python
    print(
        f"installing {', '.join(f'{name} {number}' for name, number in pins.items())} in {folder}",
        flush=True,
    )
    run(
        [sys.executable, "-m", "venv", "--clear", folder],
        log=log,
        threads=1,
        deadline_s=INSTALL_DEADLINE_S,
    )
    # torch by itself first: nothing that comes later may choose another one.
    for names in (["torch"], ["transformers", "trl"]):
        requirements = [f"{name}=={pins[name]}" for name in ["torch", *names]]
        install = [str(python), "-m", "pip", "install", *dict.fromkeys(requirements)]
        run(install, log=log, threads=1, deadline_s=INSTALL_DEADLINE_S)
    return python


def _installed(python: Path) -> dict[str, str]:
    if not python.exists():
        return {}
    code = (
        "from importlib.metadata import distributions\n"
        "for d in distributions(): print(d.metadata['Name'].lower(), d.version.split('+')[0])"
    )
    listing = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    found = dict(line.split() for line in listing.splitlines())
    return {name: found[name] for name in ("torch", "transformers", "trl") if name in found}
