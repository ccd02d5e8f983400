"""SmolLM2-135M-Instruct, the real model of examples/smollm2, for tests."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "smollm2" / "model"  # run.sh's own, kept between runs of the tests


def smollm2_folder() -> Path:
    """The model's Hugging Face folder, made where there is none; without its package, the script
    that makes it says which one.
    """
    sys.path.insert(0, str(ROOT / "examples" / "smollm2"))
    from make_model import make

    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    # Of several workers one makes it.
    with (FOLDER.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make(FOLDER)
    return FOLDER
