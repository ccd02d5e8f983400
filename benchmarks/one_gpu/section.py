"""What a section of gpu.py is given and what it finds, and how one runs in a process of its own."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """How large the measured parts are."""

    micro_tokens: int
    micro_batches: int
    longest: int
    rounds: int
    dtype: str
    matmul: int  # width of the square matmul
    copied: int  # bytes of the copy

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


FULL = Size(
    micro_tokens=16384,
    micro_batches=4,
    longest=4096,
    rounds=5,
    dtype="bf16",
    matmul=8192,
    copied=2**32,
)
TOY = Size(
    micro_tokens=256, micro_batches=2, longest=64, rounds=2, dtype="fp32", matmul=512, copied=2**20
)


@dataclass(frozen=True)
class Setting:
    """What every section is given."""

    toy: bool
    work: Path  # an empty folder
    size: Size
    references: Path | None = None  # folder of what was computed beforehand on a CPU
    model: str = ""  # of the section that trains
    recompute: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.toy else "cuda:0"

    @property
    def cuda(self) -> bool:
        return not self.toy


@dataclass(frozen=True)
class Check:
    """A distance, and the bound that it must keep."""

    name: str
    value: float
    bound: float

    @property
    def ok(self) -> bool:
        return self.value <= self.bound  # False for NaN


@dataclass
class Found:
    """What a section found."""

    checks: list[Check] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, value: float, bound: float) -> None:
        """Record a check, and print it."""
        check = Check(name, value, bound)
        self.checks.append(check)
        print(f"  {name:<62}{value:10.1e}{bound:9.0e}  {'ok' if check.ok else 'OFF'}", flush=True)

    def number(self, name: str, value: float, unit: str, remark: str = "") -> None:
        """Record a measurement, and print it."""
        self.numbers[name] = value
        print(f"  {name:<44}{value:14.6g} {unit:<10} {remark}".rstrip(), flush=True)


@dataclass(frozen=True)
class Section:
    """A part of the benchmark that runs alone: what breaks in it leaves the others."""

    name: str
    work: str  # "module:function", Setting -> Found
    limit_s: float
    model: str = ""  # for a section that trains one


def run_here(section: Section, setting: Setting, result: Path) -> None:
    """Run a section in this process, and write what it found."""
    module, function = section.work.split(":")
    found: Found = getattr(importlib.import_module(module), function)(setting)
    checks = [{**asdict(check), "ok": check.ok} for check in found.checks]
    result.write_text(
        json.dumps({"checks": checks, "numbers": found.numbers, "modules": _installed_modules()})
    )


def _installed_modules() -> list[str]:
    """Top-level names of what was imported from installed packages: a bare machine needs them."""
    places = {
        name: "".join([getattr(module, "__file__", None) or "", *getattr(module, "__path__", [])])
        for name, module in list(sys.modules.items())
        if "." not in name
    }
    installed = {name: where for name, where in places.items() if "site-packages" in where}
    # setuptools brings copies of its own
    return sorted(name for name, where in installed.items() if "_vendor" not in where)


def run_apart(command: list[str], result: Path, limit_s: float) -> dict[str, Any]:
    """Run a section's command in a process group of its own; what failed is under "error"."""
    result.unlink(missing_ok=True)
    child = subprocess.Popen(command, start_new_session=True)
    try:
        code: int | None = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if code == 0 and result.exists():
        found: dict[str, Any] = json.loads(result.read_text())
        return found
    why = f"no end within {limit_s:.0f} s" if code is None else f"exit code {code}, see above"
    return {"checks": [], "numbers": {}, "error": why}


def seconds_of(function: Callable[[], Any], rounds: int, *, cuda: bool) -> float:
    """Median over `rounds` calls after one that does not count."""
    taken = []
    for _ in range(rounds + 1):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return sorted(taken[1:])[(rounds - 1) // 2]
