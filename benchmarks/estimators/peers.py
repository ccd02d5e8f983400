"""Imports functions of other libraries, or tells why it cannot."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

PACKAGES = (
    "verl==0.9.1",
    "tensordict==0.10.0",
    "omegaconf==2.4.0",
    "antlr4-python3-runtime==4.9.3",
    "ray",
    "torchdata",
    "pyvers",
    "cloudpickle",
    "codetiming",
    "msgpack",
    "click",
    "filelock",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
    "attrs",
    "accelerate",
)
TRL_NOTE = (
    "TRL 1.16.0 has no function to call for any of this: group advantages are lines inside"
    " GRPOTrainer, and its PPO trainer, with GAE and masked whitening, is gone"
)


def install(folder: Path) -> None:
    """Put verl and what it imports into `folder`, none of it into the environment that runs this,
    torch left out.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        *PACKAGES,
    ]
    subprocess.run(command, check=True)


def verl(folder: Path) -> tuple[dict[str, ModuleType], str]:
    """verl's modules by their last name, or none, and what to say about it. Our own packages come
    first on the path.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    names = (
        "verl.trainer.ppo.core_algos",
        "verl.utils.seqlen_balancing",
        "verl.utils.torch_functional",
    )
    try:
        modules = {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    except ImportError as error:
        return {}, f"verl is left out, it does not import: {error}"
    return modules, f"verl {importlib.import_module('verl').__version__}"
