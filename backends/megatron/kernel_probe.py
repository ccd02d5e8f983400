"""Reports in JSON the trainer's packages, and the kernels that the backend would choose.

`rlcore doctor` runs this in a separate process, since torch holds memory on each GPU that it
inspects.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rlcore.interpreters.probe import answer


def kernels() -> dict[str, Any]:
    """Return the fields of `Interpreter` on kernels. Errors of torch propagate."""
    from backends.megatron.model.fused import why_not

    found: dict[str, Any] = {
        "uncompiled": why_not() or "",
        "te": find_spec("transformer_engine") is not None,
    }
    if found["te"]:
        # An installed package may fail to import.
        import_module("transformer_engine.pytorch")
    return found


def main() -> None:
    """Print the report; the argument is a JSON list of packages."""
    found = answer(json.loads(sys.argv[1]))
    try:
        found |= kernels()
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        found["kernels_broken"] = f"{type(error).__name__}: {error}".splitlines()[0]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
