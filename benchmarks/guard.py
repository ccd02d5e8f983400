"""Counts what a fixed piece of work does: numbers that no other program on the machine changes.

    python benchmarks/guard.py              # count, and compare with guard.json
    python benchmarks/guard.py --record     # write guard.json anew, in the commit that changes it

The work is GRPO on a tiny model, and the decoding of the embedded engine, in one process with one
thread. What a step or a token costs is the difference of two runs of unequal length. Counted are
torch's operators, bytes that they copy, numbers that the host reads from tensors, calls of Python,
files opened and connections made in the main thread; and the modules that each kind of process has
imported when it can begin.

`tests/integration/test_guard.py` fails when a number grows by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORD = HERE / "guard.json"
TOLERANCE = 0.05
COPIES = ("copy_", "clone", "_to_copy", "cat", "index_select", "index", "stack")
# Without gradients the second is not taken apart into the first.
HOST_READS = ("_local_scalar_dense", "item")
PROCESSES = {
    "rank": "import backends.megatron.backend, rlcore.launch.rank",
    "service": "import transformers, rollout.service, rollout.fleet.engine_memory",
    "engine": "import rollout.engines.embedded.server",
    "reward worker": "import rollout.rewards.worker",
    "command line": "import rlcore.cli",
}


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count what this thread does inside."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.overloadpacket.__name__
            counts["torch operators"] += 1
            counts["numbers read by the host"] += name in HOST_READS
            if name in COPIES and isinstance(result, torch.Tensor):
                counts["bytes copied"] += result.nbytes
            return result

    def on_event(event: str, _arguments: Any) -> None:
        # Other threads look at the machine as often as a step is long.
        if threading.get_ident() != main_thread:
            return
        if event == "open":
            counts["files opened"] += 1
        elif event == "socket.connect":
            counts["connections"] += 1

    def on_call(_frame: Any, event: str, _argument: Any) -> None:
        if event in ("call", "c_call"):
            counts["calls of Python"] += 1

    torch.set_num_threads(1)
    main_thread = threading.get_ident()
    sys.addaudithook(on_event)
    with Operators():
        sys.setprofile(on_call)
        try:
            yield counts
        finally:
            sys.setprofile(None)


def count_run(folder: Path, steps: int) -> Counter[str]:
    """Train for `steps` steps in this process."""
    from rlcore import cli

    arguments = [
        *("train", str(folder / "run.yaml"), f"run.name=guard-{steps}", f"run.dir={folder}"),
        f"training.steps={steps}",
    ]
    with counting() as counts:
        code = cli.main(arguments)
    if code:
        raise SystemExit(f"guard.py: the run ended with exit code {code}")
    return counts


def count_tokens(folder: Path, tokens: int) -> Counter[str]:
    """Generate responses of so many tokens with the embedded engine's decoding."""
    import numpy as np
    import torch
    from safetensors.torch import load_file

    from rlcore.data.generation import GenerateRequest, SamplingParams, StopStrings
    from rollout.engines.embedded.causal_lm import CausalLM
    from rollout.engines.embedded.decoding import Decoding, Slot

    model = CausalLM(str(folder / "model"), device=torch.device("cpu"), dtype="fp32")
    model.module.load_state_dict(load_file(folder / "model" / "model.safetensors"), strict=False)
    model.module.tie_weights()
    sampling = SamplingParams(max_new_tokens=tokens, stop_token_ids=())
    requests = [
        GenerateRequest(np.arange(1, 5 + draw, dtype=np.int32), sampling, draw, n=4)
        for draw in range(4)
    ]
    slots = [Slot(request, place) for request in range(4) for place in range(4)]
    decoding = Decoding(model, requests, slots, lambda _: StopStrings(()))
    with counting() as counts, torch.inference_mode():
        while not decoding.finished:
            decoding.step(1)
    return counts


COUNTED = {"step": (count_run, 3, 7), "token": (count_tokens, 8, 24)}  # of two lengths


def make_work(folder: Path) -> None:
    """Write a model, rows and a configuration."""
    from rlcore.launch.commands.init_model import ModelSpec, init_model

    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64}
    init_model(folder / "model", ModelSpec(**sizes))
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "run.yaml").write_text(f"""
run: {{threads: 1}}
model: {{path: {folder / "model"}, dtype: fp32}}
data: {{paths: {folder / "rows.jsonl"}}}
policy: {{optimizer: {{lr: 1.0e-3}}, max_tokens_per_microbatch: 256}}
algorithm: {{estimator: {{name: grpo}}}}
rollout: {{service: in_process, prompts_per_step: 8, samples_per_prompt: 4,
          sampling: {{max_new_tokens: 8}}}}
reward: {{parts: {{length: {{function: overlong, args: {{max_tokens: 8, buffer: 4}}}}}}}}
checkpoint: {{every: 0, export_hf: false}}
tracking: {{show_samples: 0}}
""")


def measure() -> dict[str, int]:
    """Count in processes of their own. Returns the numbers by name."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    found: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_work(folder)

        def output(*command: str) -> str:
            done = subprocess.run(
                [sys.executable, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            if done.returncode:
                raise SystemExit(f"guard.py: {command} failed:\n{done.stdout}{done.stderr}")
            return done.stdout

        for unit, (_, short, long) in COUNTED.items():
            counts = []
            for length in (short, long):
                said = output(str(Path(__file__)), "--count", unit, str(folder), str(length))
                counts.append(Counter(json.loads(said.splitlines()[-1])))
            for key in sorted(counts[1]):
                each = (counts[1][key] - counts[0][key]) / (long - short)
                found[f"{key}, a {unit}"] = round(each)
        for process, imports in PROCESSES.items():
            code = f"{imports}\nimport sys\nprint(len(sys.modules))"
            found[f"modules of a {process}"] = int(output("-c", code).split()[-1])
    return found


def grown(found: dict[str, int], recorded: dict[str, int]) -> list[str]:
    """Name the numbers that are more than 5 % above their record, or have none."""
    lines = []
    for name, number in found.items():
        before = recorded.get(name)
        was = "nothing" if before is None else f"{before:,}"
        # A file more is no growth.
        if before is None or number > before * (1 + TOLERANCE) + 1:
            lines.append(f"{name}: {number:,}, recorded {was}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write guard.json anew")
    parser.add_argument("--count", nargs=3, metavar=("UNIT", "FOLDER", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.count:
        unit, folder, length = options.count
        print(json.dumps(COUNTED[unit][0](Path(folder), int(length))))
        return 0
    found = measure()
    if options.record:
        RECORD.write_text(json.dumps(found, indent=2) + "\n")
    recorded = json.loads(RECORD.read_text())
    width = max(map(len, found))
    for name, number in found.items():
        print(f"{name:<{width}} {number:>12,} {recorded.get(name, 0):>12,}")
    lines = grown(found, recorded)
    print("\n".join(lines))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
