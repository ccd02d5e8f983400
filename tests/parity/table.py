"""The parity table: every case of the covering array with its worst distance from one process.

    python tests/parity/table.py                    all cases, about three minutes on two cores
    python tests/parity/table.py tp2 moe            those whose names contain one of these
    python tests/parity/table.py --default          a few cases with every value of every axis
    python tests/parity/table.py --list             names alone; nothing runs
    python tests/parity/table.py --device cuda      on GPUs over NCCL, beside one process on the CPU

Exit code 1 if a gradient or a log-prob is off by more than 1e-5 (on GPUs 1e-4; with --dtype bf16 a
gradient by more than 0.15, a log-prob by more than 0.1).

Ranks are dealt over the GPUs that torch sees. One GPU has several with NCCL 2.30 or later and
NCCL_MULTI_RANK_GPU_ENABLE=1 in the environment.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TIGHT = 1e-5
CUDA = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Gradients and log-probs of every layout against one process."
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="run the cases whose names contain one of these"
    )
    parser.add_argument(
        "--default", action="store_true", help="only the cases of the default test tier"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), default="fp32", help="bf16: dense models alone"
    )
    parser.add_argument("--list", action="store_true", help="print names only")
    options = parser.parse_args()
    import covering

    chosen = covering.one_per_axis() if options.default else covering.covering_array()
    chosen = tuple(
        case
        for case in chosen
        if not options.words or any(word in case.name for word in options.words)
        if options.dtype == "fp32" or case.family == "dense"  # experts change by rounding
    )
    if not chosen:
        parser.error(f"no case has one of {options.words} in its name; see --list")
    if options.list:
        print(*(f"{case.ranks} ranks  {case.name}" for case in chosen), sep="\n")
        return 0
    sys.path.append(str(HERE.parents[1]))  # tests.interpreters
    import covering_runs
    import oracle
    from rank_main import ON_CUDA

    on_cuda = options.device == "cuda"
    near = CUDA if on_cuda else TIGHT
    bounds = (near, near) if options.dtype == "fp32" else (0.15, 0.1)
    width = max(len(case.name) for case in chosen)
    print(
        f"{'layout-family-embeddings-algorithm-minibatches-budget':<{width}}  ranks  micro "
        " gradient   log-prob   seconds"
    )
    off = 0
    with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
        oracle.write_models(Path(temporary) / "models")
        rows = covering_runs.run(
            chosen, Path(temporary), dtype=options.dtype, environment=ON_CUDA if on_cuda else {}
        )
        for row in rows:
            bad = not (row.gradient <= bounds[0] and row.logprob <= bounds[1])
            off += bad
            print(
                f"{row.case.name:<{width}}  {row.case.ranks:5}  {row.micro_batches:5} "
                f" {row.gradient:8.1e}  {row.logprob:9.1e} "
                f" {row.seconds:6.1f}{f'  OFF: {row.weight}' if bad else ''}",
                flush=True,
            )
    within = f"{bounds[0]:g}" if bounds[0] == bounds[1] else f"{bounds[0]:g} and {bounds[1]:g}"
    print(f"{len(chosen) - off} of {len(chosen)} cases within {within} of one process")
    return 1 if off else 0


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parents[1])]
    sys.exit(main())
