"""Checks the CUDA path, then measures tokens/s and MFU of Qwen2.5 shapes (run by gpu.sh).

The limit is the matmul rate that the same device reaches in the same dtype, measured first; MFU is
of that rate, with the FLOPs of the model alone: recomputation, also the head's own, counts as lost
time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from one_gpu.checks import Check, check_attention, check_head, check_step
from one_gpu.models import SHAPES, full_packs, make_batch, make_config, write_model
from one_gpu.parts import time_by_part
from one_gpu.step import trainer


@dataclass(frozen=True)
class Size:
    """How large the measured part is."""

    micro_tokens: int
    micro_batches: int
    longest: int
    rounds: int
    dtype: str
    matmul: int  # width of the square matmul


FULL = Size(micro_tokens=16384, micro_batches=4, longest=4096, rounds=5, dtype="bf16", matmul=8192)
TOY = Size(micro_tokens=256, micro_batches=2, longest=64, rounds=2, dtype="fp32", matmul=512)


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


def matmul_rate(size: Size, device: str) -> float:
    """FLOP/s of a large square product in the training dtype."""
    dtype = torch.bfloat16 if size.dtype == "bf16" else torch.float32
    a, b = (torch.randn(size.matmul, size.matmul, device=device, dtype=dtype) for _ in range(2))
    calls = 20

    def several() -> None:
        for _ in range(calls):
            torch.mm(a, b)

    return calls * 2 * size.matmul**3 / seconds_of(several, 5, cuda=device != "cpu")


def train(
    name: str, size: Size, device: str, rate: float, work: Path, *, recompute: bool
) -> dict[str, Any]:
    """Measure passes and steps of one model."""
    cuda = device != "cpu"
    shape = SHAPES[name]
    folder = work / name
    write_model(folder, shape, torch.bfloat16 if size.dtype == "bf16" else torch.float32)
    batch = make_batch(shape, size.micro_tokens, size.micro_batches, size.longest)
    config = make_config(
        folder,
        dtype=size.dtype,
        micro_tokens=size.micro_tokens,
        optimizer={"lr": 1e-6, "distributed": True},
        offload=True,
        recompute=recompute,
    )
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with trainer(config, batch, device, full_packs(batch, size.micro_tokens)) as made:
        chosen = made.backend.describe()
        made.assign()
        update_s = seconds_of(made.update, size.rounds, cuda=cuda)
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        score_s = seconds_of(made.score, size.rounds, cuda=cuda)
        reference_s = seconds_of(lambda: made.score("reference"), size.rounds, cuda=cuda)
        parts = time_by_part(made.update, cuda=cuda)
        micro_batches = made.micro_batches
    tokens = sum(batch.lengths.tolist())
    # an update: forward and backward
    flops = 3.0 * shape.sizes.forward_flops(batch.lengths.tolist(), batch.num_trainable)
    return {
        "model": name,
        "parameters": shape.sizes.parameters,
        "tokens": tokens,
        "micro_batches": micro_batches,
        "update_s": update_s,
        "score_s": score_s,
        "reference_s": reference_s,
        "tokens_per_s": tokens / update_s,
        "mfu": flops / update_s / rate,
        "peak_bytes": peak,
        "parts_s": parts,
        "chosen": chosen,
    }


def show(found: dict[str, Any]) -> None:
    tokens = found["tokens"]
    chosen = found["chosen"]
    print(
        f"\n{found['model']}: {found['parameters'] / 1e6:.1f} M parameters, {tokens} tokens a step"
        f" in {found['micro_batches']} micro-batches; {chosen['attention']}, {chosen['layers']}"
    )
    for name, remark in (
        ("update", f"MFU {found['mfu']:.1%} of matmul"),
        ("score", ""),
        ("reference", "weights swapped in"),
    ):
        seconds = found[f"{name}_s"]
        print(f"  {name:<12}{seconds:9.3f} s {tokens / seconds:12.0f} tokens/s   {remark}")
    if found["peak_bytes"]:
        print(f"  peak memory {found['peak_bytes'] / 2**30:9.2f} GiB allocated")
    whole = sum(found["parts_s"].values())
    print(f"  of a profiled update, {whole:.3f} s of operations:")
    for part, seconds in found["parts_s"].items():
        print(f"    {part:<26}{seconds:9.4f} s  {seconds / whole:6.1%}")


def run_checks(device: str, work: Path, *, toy: bool) -> list[Check]:
    checks: list[Check] = []
    print(f"{'check':<62}{'distance':>10}{'bound':>9}")
    for some in (
        lambda: check_attention(device),
        lambda: check_head(device),
        lambda: check_step(device, work, toy=toy),
    ):
        for check in some():
            checks.append(check)
            print(
                f"{check.name:<62}{check.value:10.1e}{check.bound:9.0e} "
                f" {'ok' if check.ok else 'OFF'}",
                flush=True,
            )
    return checks


def main() -> int:
    parser = argparse.ArgumentParser(
        description="The CUDA path: right? how fast? Exit code 1 if a check is off."
    )
    parser.add_argument("--toy", action="store_true", help="on the CPU, at toy size")
    parser.add_argument("--only", choices=("checks", "train"), help="one half")
    parser.add_argument("--models", default=None, help=f"of {', '.join(SHAPES)}; default 0.5B,1.5B")
    parser.add_argument(
        "--recompute", action="store_true", help="recompute every layer in the backward pass"
    )
    parser.add_argument(
        "--micro-tokens", type=int, default=None, help="tokens of a pack; default 16384"
    )
    parser.add_argument("--json", type=Path, default=None, help="write everything there too")
    options = parser.parse_args()
    names = (options.models or ("toy" if options.toy else "0.5B,1.5B")).split(",")
    if unknown := sorted(set(names) - set(SHAPES)):
        parser.error(f"--models: no {', '.join(unknown)}; there are {', '.join(SHAPES)}")
    if not options.toy and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --toy runs on the CPU")
    device, size = ("cpu", TOY) if options.toy else ("cuda:0", FULL)
    if options.micro_tokens is not None:
        size = replace(size, micro_tokens=options.micro_tokens)
    report: dict[str, Any] = {
        "device": "cpu" if options.toy else torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "size": asdict(size),
    }
    print(f"{report['device']}, torch {torch.__version__}", flush=True)
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="gpu-") as temporary:
        work = Path(temporary)
        if options.only != "train":
            checks = run_checks(device, work, toy=options.toy)
        if options.only != "checks":
            report["matmul_flops"] = rate = matmul_rate(size, device)
            print(
                f"\nmatmul {size.matmul} x {size.matmul}, {size.dtype}: {rate / 1e12:.2f} TFLOP/s:"
                " the limit",
                flush=True,
            )
            report["models"] = []
            for name in names:
                try:
                    report["models"].append(
                        train(name, size, device, rate, work, recompute=options.recompute)
                    )
                except torch.OutOfMemoryError as error:
                    advice = f"set --recompute, or fewer --micro-tokens than {size.micro_tokens}"
                    raise SystemExit(f"{name}: {error}\n{advice}") from error
                show(report["models"][-1])
    report["checks"] = [{**asdict(check), "ok": check.ok} for check in checks]
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    off = [check.name for check in checks if not check.ok]
    if checks:
        print(f"\n{len(checks) - len(off)} of {len(checks)} checks hold")
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
