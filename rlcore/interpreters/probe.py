"""Says in JSON what the interpreter that runs it has installed.

`rlcore.interpreters.ask` runs it by its path, in environments without rlcore: it imports the
standard library, and torch where that is there.
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
    """Return the fields of `Interpreter` but for the kernels."""
    told: dict[str, Any] = {"python": platform.python_version(), "packages": {}}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            told["packages"][name] = metadata.version(name)
    try:
        import torch

        told["torch"] = torch.__version__
        told["cuda"] = torch.version.cuda or ""
        told["gpus"] = torch.cuda.device_count()
        number = ctypes.c_int()
        try:
            # the library that is loaded; `torch.cuda.nccl.version()` is that of torch's build
            ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
            digits: tuple[int, ...] = (
                number.value // 10000,
                number.value // 100 % 100,
                number.value % 100,
            )
        except (OSError, AttributeError):
            digits = torch.cuda.nccl.version()[:3] if torch.version.cuda else ()
        told["nccl"] = ".".join(map(str, digits))
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        told["broken"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return told


if __name__ == "__main__":
    # the folder of this file, whose modules have names of the standard library's and others'
    sys.path.pop(0)
    print(json.dumps(answer(json.loads(sys.argv[1]))))
