"""Measures checkpoints: how long they stop training, each rank's share, and an export.

    python benchmarks/checkpoints.py                    # all of it; 8 GB of disk, 12 GB of memory
    python benchmarks/checkpoints.py --only stall       # or ranks, or export
    python benchmarks/checkpoints.py --quick            # small; numbers mean little

- stall: one process saves alternately while training waits and in the background: how long training
  stands still, and how long the thread writes.
- ranks: four processes under DP 4 and under EP 2 x DP 2, with the distributed optimizer in bf16:
  bytes that each rank writes and reads, by how much its resident memory rises, and the time beside
  that of writing the same bytes to raw files. Goal: at most 10 % of what the rank holds.
- export: `rlcore export` of a checkpoint of 8 GB: seconds and peak memory. Goal: 2 GB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gloo_ranks import run_ranks
from workers.checkpoint_ranks import build

from backends.megatron.backend import MegatronBackend

LIMIT_S = 600.0
WORKER = Path(__file__).with_name("workers") / "checkpoint_ranks.py"
RANKS = 4
LAYOUTS = {"DP 4": 1, "EP 2 x DP 2": 2}  # degree of expert parallelism
MOST_RISE = 0.1
MOST_EXPORT = 2 << 30
GB = 1e9


def write_model(folder: Path, hidden: int, layers: int, *, experts: int = 0) -> Path:
    """Write a model of random weights."""
    import transformers

    transformers.utils.logging.disable_progress_bar()

    sizes: dict[str, Any] = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 3 * hidden,
        "vocab_size": 32768,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    if experts:
        sizes |= {"num_experts": experts, "num_experts_per_tok": 2}
        config = transformers.Qwen3MoeConfig(**sizes, moe_intermediate_size=hidden)
    else:
        config = transformers.Qwen3Config(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


# --- how long training stands still ---------------------------------------------------------------


def save_while_waiting(backend: MegatronBackend, folder: Path) -> tuple[float, float]:
    """Return the seconds that training stood still, and 0 for the background."""
    began = time.perf_counter()
    backend.save(folder)
    return time.perf_counter() - began, 0.0


def save_in_background(backend: MegatronBackend, folder: Path) -> tuple[float, float]:
    began = time.perf_counter()
    backend.start_save(folder)
    blocked = time.perf_counter() - began
    while (written := backend.save_seconds()) is None:
        assert time.perf_counter() - began < LIMIT_S
        time.sleep(0.01)
    began = time.perf_counter()
    backend.finish_save()
    return blocked + time.perf_counter() - began, written


def stall(folder: Path, *, quick: bool) -> bool:
    model = write_model(folder / "model", 96 if quick else 768, 2 if quick else 12)
    backend = build(model, {"model.dtype": "fp32"})
    parameters = sum(p.numel() for chunk in backend.policy.chunks for p in chunk.parameters())
    print(f"{parameters / 1e6:.0f} M parameters, {parameters * 12 / GB:.2f} GB with moments")
    for number in range(3):
        for name, save in (("waiting", save_while_waiting), ("background", save_in_background)):
            target = folder / f"{name}{number}"
            blocked, written = save(backend, target)
            shutil.rmtree(target)
            print(
                f"{name:10} stands still {blocked:6.2f} s, written in the background"
                f" {written:6.2f} s",
                flush=True,
            )
    backend.close()
    return True


# --- what each rank writes and reads --------------------------------------------------------------


def ranks(folder: Path, *, quick: bool) -> bool:
    fits = True
    for layout, expert in LAYOUTS.items():
        here = folder / f"ep{expert}"
        here.mkdir()
        hidden, layers = (96, 2) if quick else (768, 12)
        experts = 8 if expert > 1 else 0
        model = write_model(here / "model", hidden, layers, experts=experts)
        settings = {
            "model.dtype": "bf16",
            "policy.optimizer.distributed": True,
            "policy.parallel.expert": expert,
            "cluster.launcher": "torchrun",
        }
        payload = {"model": str(model), "settings": settings}
        (here / "payload.json").write_text(json.dumps(payload))
        run_ranks(WORKER, here, RANKS)
        print(f"\n{layout}: GB and seconds of each rank, saving | loading")
        for rank in range(RANKS):
            found = json.loads((here / f"{rank}.json").read_text())
            fits &= _print_rank(found)
        shutil.rmtree(here)
    return fits


def _print_rank(found: dict[str, Any]) -> bool:
    """Print what a rank measured, and return whether its memory rose as little as it should."""
    held = found["read"]  # a rank reads what it holds
    rises = [found[what]["peak"] / held for what in ("save", "load")]
    print(
        f"  writes {found['written'] / GB:.3f} in {found['save']['seconds']:.2f} s (raw"
        f" {found['raw']['seconds']:.2f} s), memory +{100 * rises[0]:.1f} %"
        f" | reads {held / GB:.3f} in {found['load']['seconds']:.2f} s,"
        f" memory +{100 * rises[1]:.1f} %"
    )
    return max(rises) <= MOST_RISE


# --- export ---------------------------------------------------------------------------------------


EXPORT = """
import sys
from rlcore.cli import main
code = main(["export", *sys.argv[1:]])
with open("/proc/self/status") as file:
    [peak] = [int(line.split()[1]) for line in file if line.startswith("VmHWM:")]
print(peak << 10)
sys.exit(code)
"""


def export(folder: Path, *, quick: bool) -> bool:
    model = write_model(folder / "model", 96 if quick else 1536, 2 if quick else 24)
    payload = {"model": str(model), "settings": {"model.dtype": "fp32"}}
    (folder / "payload.json").write_text(json.dumps(payload))
    run_ranks(WORKER, folder, 1)
    saved = json.loads((folder / "0.json").read_text())["written"]
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", EXPORT, folder / "saved", folder / "hf"],
        check=True,
        timeout=LIMIT_S,
        stdout=subprocess.PIPE,
        text=True,
    )
    seconds = time.perf_counter() - began
    peak = int(done.stdout.split()[-1])
    size = sum(path.stat().st_size for path in (folder / "hf").glob("*.safetensors"))
    print(
        f"\nexport of a checkpoint of {saved / GB:.2f} GB: {size / GB:.2f} GB in {seconds:.1f} s,"
        f" peak memory {peak / GB:.2f} GB"
    )
    return peak <= MOST_EXPORT


PARTS = {"stall": stall, "ranks": ranks, "export": export}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=[*PARTS])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--folder", type=Path, help="on the disk that is to be measured")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    fits = True
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
                fits &= part(Path(scratch), quick=arguments.quick)
    return 0 if fits or arguments.quick else 1


if __name__ == "__main__":
    sys.exit(main())
