"""Prints as JSON what the interpreter that runs this file has installed.

`rlcore.interpreters.ask` runs this file by its path, in environments without rlcore. So it imports
the standard library, and torch where that is installed.
"""

from __future__ import annotations

import ctypes
import json
import platform
import sys
from contextlib import suppress
from importlib import metadata
from typing import Any


def answer(names: list[str]) -> dict[str, Any]:
    """Return the fields of `Interpreter`, except those about kernels."""
    answered: dict[str, Any] = {"python": platform.python_version(), "packages": {}}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            answered["packages"][name] = metadata.version(name)
    try:
        import torch

        answered["torch"] = torch.__version__
        answered["cuda"] = torch.version.cuda or ""
        answered["gpus"] = torch.cuda.device_count()
        number = ctypes.c_int()
        try:
            # Ask the loaded library: `torch.cuda.nccl.version()` is the version at torch's build.
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
            digits: tuple[int, ...] = (
                number.value // 10000,
                number.value // 100 % 100,
                number.value % 100,
            )
        except (OSError, AttributeError):
            digits = torch.cuda.nccl.version()[:3] if torch.version.cuda else ()
        answered["nccl"] = ".".join(map(str, digits))
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        answered["broken"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return answered


if __name__ == "__main__":
    # Remove the folder of this file: its modules would shadow packages of the same names.
    sys.path.pop(0)
    print(json.dumps(answer(json.loads(sys.argv[1]))))
