"""Checks the CUDA path, then measures it, one section after the other (run by gpu.sh).

Each section runs in a process of its own under a deadline, the most valuable first, and the JSON
file is written again after each: whatever breaks or takes too long leaves the others. MFU is of the
matmul rate that the same device reaches in the same dtype, with the FLOPs of the model alone:
recomputation, also the head's own, counts as lost time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from one_gpu.section import FULL, TOY, Section, Setting, run_apart, run_here

LIMIT_S = 560.0  # of all sections
LEAST_S = 10.0  # a section with less time is not begun
TOY_LIMIT_S = 900.0  # of each toy section, on a machine that others use too
MODELS = ("1.5B", "0.5B")


def sections(*, toy: bool) -> list[Section]:
    """All sections, in the order in which they run."""
    first, *others = (
        Section(f"training {name}", "one_gpu.training:train", 150.0, model=name)
        for name in (("toy",) if toy else MODELS)
    )
    found = [
        Section("attention", "one_gpu.checks:check_attention", 90.0),
        Section("head", "one_gpu.checks:check_head", 60.0),
        Section("step", "one_gpu.checks:check_step", 180.0),
        Section("experts", "one_gpu.checks:check_experts", 180.0),
        Section("memory", "one_gpu.memory:check_memory", 120.0),
        Section("ceilings", "one_gpu.ceilings:ceilings", 60.0),
        first,
        Section("sharing", "one_gpu.sharing:check_sharing", 90.0),
        Section("kernels", "one_gpu.kernels:check_kernels", 90.0),
        Section("head alone", "one_gpu.head_alone:head_alone", 60.0),
        Section("engine", "one_gpu.engine:engine_beside", 120.0),
        Section("handles", "one_gpu.handles:publish_by_handle", 90.0),
        Section("runs", "one_gpu.runs:whole_runs", 180.0),
        Section("groups", "one_gpu.groups:weight_groups", 90.0),
        Section("ranks", "one_gpu.ranks:runs_of_two_ranks", 180.0),
        *others,
    ]
    return [replace(section, limit_s=TOY_LIMIT_S) for section in found] if toy else found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="The CUDA path: right? how fast? Exit code 1: a check is off, a section failed."
    )
    parser.add_argument("--toy", action="store_true", help="on the CPU, at toy size")
    parser.add_argument("--only", default=None, help="names of sections, with commas")
    parser.add_argument("--recompute", action="store_true", help="recompute every layer")
    parser.add_argument(
        "--micro-tokens", type=int, default=None, help="tokens of a pack; default 16384"
    )
    parser.add_argument(
        "--limit", type=float, default=None, help="seconds for all; default 560, none with --toy"
    )
    parser.add_argument("--json", type=Path, default=None, help="write everything there too")
    parser.add_argument(
        "--references", type=Path, default=None, help="folder of CPU references, see gpu.sh"
    )
    parser.add_argument(
        "--write-references", type=Path, default=None, help="compute them on this CPU, and end"
    )
    parser.add_argument("--section", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = [section.name for section in sections(toy=options.toy)]
    if options.only is not None and (unknown := sorted(set(options.only.split(",")) - set(names))):
        parser.error(f"--only: no {', '.join(unknown)}; there are {', '.join(names)}")
    on_cpu = options.toy or options.write_references is not None
    if not on_cpu and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --toy runs on the CPU")
    return options


def run_section(options: argparse.Namespace) -> None:
    """The process of one section."""
    size = TOY if options.toy else FULL
    if options.micro_tokens is not None:
        size = replace(size, micro_tokens=options.micro_tokens)
    [section] = [each for each in sections(toy=options.toy) if each.name == options.section]
    with tempfile.TemporaryDirectory(prefix="gpu-") as work:
        setting = Setting(
            toy=options.toy,
            work=Path(work),
            size=size,
            references=options.references,
            recompute=options.recompute,
            model=section.model,
        )
        run_here(section, setting, options.result)
    # a thread that is inside an aborted group of NCCL would end this process by SIGABRT
    sys.stdout.flush()
    os._exit(0)


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Run the sections one after the other, and return the report."""
    limit = options.limit or (float("inf") if options.toy else LIMIT_S)
    ends = time.monotonic() + limit
    report: dict[str, Any] = {
        "device": "cpu" if options.toy else torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "megatron-core": version("megatron-core"),
        "date": time.strftime("%Y-%m-%d"),
        "size": asdict(TOY if options.toy else FULL),
        "sections": {},
    }
    print(f"{report['device']}, torch {torch.__version__}", flush=True)
    chosen = None if options.only is None else options.only.split(",")
    for section in sections(toy=options.toy):
        if chosen is not None and section.name not in chosen:
            continue
        print(f"\n{section.name}", flush=True)
        began = time.monotonic()
        left = ends - began
        if left < LEAST_S:
            found: dict[str, Any] = {"checks": [], "numbers": {}, "error": "no time was left"}
        else:
            found = one_section(section, options, min(section.limit_s, left))
        found["seconds"] = time.monotonic() - began
        report["sections"][section.name] = found
        if "error" in found:
            print(f"  not finished: {found['error']}", flush=True)
        if options.json:  # whole at any moment: this program may be ended from outside
            part = options.json.with_suffix(".part")
            part.write_text(json.dumps(report, indent=1))
            part.replace(options.json)
    return report


def one_section(section: Section, options: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """Run a section as this program does it with `--section`."""
    with tempfile.TemporaryDirectory(prefix="gpu-result-") as folder:
        result = Path(folder) / "found.json"
        command = [sys.executable, *sys.argv, "--section", section.name, "--result", str(result)]
        return run_apart(command, result, limit_s)


def main() -> int:
    options = parse()
    if options.write_references is not None:
        from one_gpu.checks import write_references

        write_references(options.write_references, toy=options.toy)
        return 0
    if options.section is not None:
        run_section(options)
        return 0
    # whoever ends this program ends the running section too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found = run_all(options)["sections"]
    checks = [check for section in found.values() for check in section["checks"]]
    held = sum(check["ok"] for check in checks)
    failed = [name for name, section in found.items() if "error" in section]
    print(f"\n{held} of {len(checks)} checks hold")
    if failed:
        print(f"not finished: {', '.join(failed)}")
    return 0 if held == len(checks) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
