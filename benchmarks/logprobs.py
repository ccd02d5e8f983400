"""Measures the fused LM head beside two plain ones: seconds and extra peak memory of both passes.

    .venv/bin/python benchmarks/logprobs.py                     # on the CPU, fp32 and bf16
    .venv/bin/python benchmarks/logprobs.py --device cuda --json result.json

Each measurement is a fresh process. Exit code 1: ours was slower than `log_softmax`, or its memory
    more than 1/16 of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from workers.logprobs_case import HEADS, Measured

DTYPES = ("fp32", "bf16")
MEMORY_SHARE = 1 / 16
DEADLINE_S = 1800.0
NAMES = {
    "ours": "fused head",
    "log_softmax": "F.linear + log_softmax + entropy",
    "cross_entropy": "F.cross_entropy alone",
}


def measure(head: str, dtype: str, arguments: argparse.Namespace) -> Measured:
    """Measure in a process of its own. Raises CalledProcessError or TimeoutExpired."""
    case = Path(__file__).with_name("workers") / "logprobs_case.py"
    command = [sys.executable, str(case), head, dtype]
    for name in ("device", "threads", "tokens", "hidden", "vocabulary", "repeats"):
        command += [f"--{name}", str(getattr(arguments, name))]
    threads = {"OMP_NUM_THREADS": str(arguments.threads), "MKL_NUM_THREADS": str(arguments.threads)}
    done = subprocess.run(
        command,
        env={**os.environ, **threads},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    )
    measured = Measured(**json.loads(done.stdout))
    # a long run that is stopped is not lost
    print(f"{dtype}, {NAMES[head]}: {measured}", file=sys.stderr, flush=True)
    return measured


def table(results: dict[str, dict[str, Measured]]) -> str:
    """Make a Markdown table, one row a measurement; "matmuls" is `Measured.matmul_seconds`."""
    lines = [
        "| | seconds | CPU seconds | matmuls | extra peak memory, MiB | of log_softmax's |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for dtype, heads in results.items():
        for head, m in heads.items():
            share = heads["log_softmax"].extra_bytes / m.extra_bytes
            lines.append(
                f"| {dtype}, {NAMES[head]} | {m.seconds:.2f} | {m.cpu_seconds:.2f} |"
                f" {m.matmul_seconds:.2f} | {m.extra_bytes / 2**20:.0f} | 1/{share:.1f} |"
            )
    return "\n".join(lines)


def missed(results: dict[str, dict[str, Measured]], device: str) -> list[str]:
    """List the goals that were not reached. On a CPU, CPU seconds are compared."""
    clock = "cpu_seconds" if device == "cpu" else "seconds"
    failures = []
    for dtype, heads in results.items():
        ours = heads["ours"]
        plain = heads["log_softmax"]
        if ours.extra_bytes > MEMORY_SHARE * plain.extra_bytes:
            failures.append(
                f"{dtype}: extra memory {ours.extra_bytes} is more than 1/16 of {plain.extra_bytes}"
            )
        if getattr(ours, clock) >= getattr(plain, clock):
            failures.append(
                f"{dtype}: {getattr(ours, clock):.2f} s is not faster than"
                f" {getattr(plain, clock):.2f} s"
            )
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="default: both")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    arguments = parser.parse_args()
    results = {
        dtype: {head: measure(head, dtype, arguments) for head in HEADS}
        for dtype in arguments.dtype or DTYPES
    }
    shape = (
        f"{arguments.tokens} tokens, hidden {arguments.hidden}, vocabulary {arguments.vocabulary}"
    )
    print(f"{shape}; {arguments.device}, {arguments.threads} threads\n\n{table(results)}")
    if arguments.json is not None:
        numbers = {
            dtype: {head: asdict(m) for head, m in heads.items()}
            for dtype, heads in results.items()
        }
        arguments.json.write_text(json.dumps({"arguments": shape, "results": numbers}, indent=1))
    failures = missed(results, arguments.device)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
