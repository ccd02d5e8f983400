"""What it brings to compute each prefix once: training and scoring, on and off, side by side.

    python benchmarks/prefixes.py                  # all of it, about half an hour on two cores
    python benchmarks/prefixes.py --only tree      # settings whose names contain the word
    python benchmarks/prefixes.py --quick          # small; numbers mean little

The sides take turns in one process, and each pair gives a ratio; the table has the medians. The
limit beside them is the ratio of tokens: what would be gained if all else cost nothing and
attention were free. Peak memory is that of one update, each side in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from one_gpu.models import Shape, make_config, write_model
from process import busy_seconds
from report import machine
from torch import Tensor

from rlcore.data.batch import RolloutBatch
from rlcore.data.packing.plan import plan_minibatches

if TYPE_CHECKING:
    from backends.megatron.backend import MegatronBackend
    from backends.megatron.batch.local_batch import LocalBatch

SIDES = ("off", "gathered", "merged", "auto")
MODELS = {
    "0.6M": Shape(128, 384, 3, 4, 2, vocab=128),
    "12.6M": Shape(512, 1408, 4, 8, 4, vocab=512),
}
# copies of keys a token, and tokens of a prefix, from which on the attention is merged
FORMS = {"gathered": (float("inf"), 0), "merged": (0.0, 0)}
OPTIMIZER = {"lr": 1e-30, "weight_decay": 0.0}


@dataclass(frozen=True)
class Setting:
    """Groups of sequences that begin alike.

    Attributes:
        groups: how many prompts.
        samples: of each.
        prompt: tokens.
        response: tokens, from and to.
        goal: how many times as fast training should be, on the smaller model.
        tree: each response is this many turns, each with as many branches.
    """

    name: str
    groups: int
    samples: int
    prompt: int
    response: tuple[int, int]
    pack: int = 16384
    goal: float | None = None
    tree: int = 0
    pairs: int = 5


SETTINGS = (
    Setting("quickstart", 32, 8, 6, (3, 4), goal=1.5, pairs=31),
    Setting("P 256 R 256 n 8", 4, 8, 256, (256, 256), goal=1.6),
    Setting("P 1024 R 256 n 16", 1, 16, 1024, (256, 256), goal=3.0),
    Setting("P 4096 R 256 n 32", 1, 32, 4096, (256, 256), goal=8.0, pairs=3),
    Setting("tree 3 x 3 x 3", 2, 1, 60, (20, 40), tree=3, goal=2.0, pairs=11),
    Setting("nothing shared", 32, 1, 0, (200, 400), pairs=21),
)
TINY = (
    Setting("quickstart", 8, 4, 6, (3, 4), pairs=2),
    Setting("tree 3 x 3 x 3", 1, 1, 6, (3, 4), tree=3, pairs=2),
)


def make_batch(setting: Setting, vocab: int) -> RolloutBatch:
    """Draw the sequences, group behind group."""
    generator = torch.Generator().manual_seed(4)

    def drawn(low: int, high: int) -> Tensor:
        size = int(torch.randint(low, high + 1, (1,), generator=generator))
        return torch.randint(2, vocab, (size,), generator=generator)

    sequences: list[tuple[Tensor, Tensor]] = []
    groups: list[int] = []
    for group in range(setting.groups):
        prompt = drawn(setting.prompt, setting.prompt)
        paths = [(prompt, torch.zeros(len(prompt), dtype=torch.bool))] * setting.samples
        for _ in range(setting.tree or 1):
            paths = [
                (torch.cat([tokens, turn]), torch.cat([mask, torch.ones(len(turn)).bool()]))
                for tokens, mask in paths
                for _ in range(setting.tree or 1)
                for turn in [drawn(*setting.response)]
            ]
        sequences += paths
        groups += [group] * len(paths)
    if not setting.prompt:
        for _, mask in sequences:
            mask[0] = False  # the first token of a sequence is predicted from nothing
    mask = torch.cat([part for _, part in sequences])
    trainable = int(mask.sum())
    count = len(sequences)
    return RolloutBatch(
        torch.cat([tokens for tokens, _ in sequences]).int(),
        torch.tensor([0, *(len(tokens) for tokens, _ in sequences)]).cumsum(0),
        mask,
        {
            "rollout_logprobs": torch.full((trainable,), -5.0),
            "versions": torch.zeros(trainable, dtype=torch.int64),
            "rewards": torch.randn(count, generator=generator),
            "group_ids": torch.tensor(groups),
            "rollout_ids": torch.arange(count),
            "sequence_ids": torch.arange(count),
        },
    )


def make_backend(folder: Path, pack: int) -> MegatronBackend:
    """The one backend, whose sides differ in their packs."""
    from backends.megatron.backend import MegatronBackend
    from rlcore.trainer.objective import Objective

    config = make_config(
        folder, dtype="fp32", micro_tokens=pack, optimizer=OPTIMIZER, offload=False
    )
    return MegatronBackend(
        config,
        Objective(config.algorithm),
        with_reference=False,
        with_critic=False,
        total_steps=1000,
        device=torch.device("cpu"),
    )


class Side:
    """A backend that shares prefixes in one way, or not."""

    def __init__(self, name: str, backend: MegatronBackend) -> None:
        self.name = name
        self.backend = backend
        config = backend.config
        sharing = "off" if name == "off" else "on"
        self.config = config.model_copy(
            update={"policy": config.policy.model_copy(update={"share_prefixes": sharing})}
        )
        self.batch: LocalBatch | None = None

    def load(self, batch: RolloutBatch) -> None:
        """Lay the batch out and assign its vectors."""
        backend = self.backend
        backend.config = self.config
        plans = plan_minibatches(backend.plan_rules, batch, [range(batch.num_sequences)])
        backend.load_batch(batch, plans)
        count = batch.num_trainable
        generator = torch.Generator().manual_seed(5)
        backend.assign(
            {
                "advantages": torch.randn(count, generator=generator),
                "weights": torch.full((count,), 1 / count),
                "old_logprobs": torch.full((count,), -5.0),
                "ref_logprobs": torch.full((count,), -5.0),
            }
        )
        self.batch = backend._local_batch

    def seconds(self, what: str) -> float:
        """Time an update or a scoring pass."""
        from backends.megatron.model.attention import core

        core.MERGED_FROM, core.LONG_PREFIX = FORMS.get(self.name, CHOSEN)
        self.backend.config = self.config
        self.backend._local_batch = self.batch
        call: Callable[[], Any] = (
            (lambda: self.backend.update(0))
            if what == "training"
            else (lambda: self.backend.score("policy"))
        )
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    def shared(self) -> float:
        """Return the share of tokens that is not computed."""
        assert self.batch is not None
        repeated = torch.cat([micro.repeated for micro in self.batch.micro_batches(0)])
        return float(repeated.double().mean())


CHOSEN: tuple[float, int] = (0.0, 0)  # those of the backend, once it is imported


def take_backend() -> None:
    """Import Megatron, and remember which form is chosen where."""
    global CHOSEN
    from backends.megatron.cpu.shim import importing_megatron

    with importing_megatron():
        from backends.megatron.model.attention import core
    CHOSEN = core.MERGED_FROM, core.LONG_PREFIX


def measure_alone(setting: Setting, model: str, folder: Path) -> dict[str, Any]:
    """Measure with a backend that is closed at the end."""
    backend = make_backend(folder, setting.pack)
    try:
        return measure(setting, model, backend)
    finally:
        backend.close()


def measure(setting: Setting, model: str, backend: MegatronBackend) -> dict[str, Any]:
    """Time all sides in turns."""
    batch = make_batch(setting, MODELS[model].vocab)
    names = SIDES if setting.prompt else ("off", "auto")
    sides = [Side(name, backend) for name in names]
    for side in sides:
        side.load(batch)
    ratio = 1 / (1 - next(side.shared() for side in sides if side.name != "off"))
    row: dict[str, Any] = {"setting": setting.name, "model": model, "tokens": len(batch.tokens)}
    row |= {"token_ratio": ratio, "goal": setting.goal}
    for what in ("training", "scoring"):
        for side in sides:
            side.seconds(what)
        rounds = []
        for k in range(max(1, setting.pairs // (1 if model == "0.6M" else 3))):
            order = sides if k % 2 else sides[::-1]
            rounds.append({side.name: side.seconds(what) for side in order})
        for name in names:
            seconds = statistics.median(taken[name] for taken in rounds)
            row[f"{what} {name}"] = seconds
            if name != "off":
                row[f"{what} ratio {name}"] = statistics.median(
                    taken["off"] / taken[name] for taken in rounds
                )
    return row


def peak(setting: Setting, model: str, folder: Path, side: str) -> int:
    """Bytes that one update adds to the process, in a process of its own."""
    command = [sys.executable, __file__, "--peak", setting.name, model, side, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    return int(done.stdout.split()[-1])


def print_peak(setting: Setting, model: str, side_name: str, folder: Path) -> None:
    """The child's half of `peak`."""
    take_backend()
    side = Side(side_name, make_backend(folder, setting.pack))
    small = replace(setting, groups=1, samples=2, prompt=4, response=(3, 4), tree=0)
    side.load(make_batch(small, MODELS[model].vocab))
    side.seconds("training")  # optimizer state, workspaces
    side.load(make_batch(setting, MODELS[model].vocab))
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    side.seconds("training")
    print(resident_bytes("VmHWM") - before)


def resident_bytes(which: str) -> int:
    """Read a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{which}:"))


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table."""
    lines = [
        "| setting | model | tokens | training, s: off / on | times as fast (gathered, merged) |"
        " scoring | peak, MB: off / on | limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        forms = [row[f"training ratio {name}"] for name in SIDES[1:3] if f"training {name}" in row]
        inside = f" ({', '.join(f'{x:.2f}' for x in forms)})" if forms else ""
        lines.append(
            f"| {row['setting']} | {row['model']} | {row['tokens']:,} |"
            f" {row['training off']:.3f} / {row['training auto']:.3f} |"
            f" {row['training ratio auto']:.2f}{inside} | {row['scoring ratio auto']:.2f} |"
            f" {row['peak off'] / 1e6:.0f} / {row['peak auto'] / 1e6:.0f} |"
            f" {row['token_ratio']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--model", choices=list(MODELS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.peak:
        name, model, side, folder = given.peak
        setting = next(one for one in SETTINGS + TINY if one.name == name)
        print_peak(setting, model, side, Path(folder))
        return
    take_backend()
    rows = []
    busy = busy_seconds() - time.process_time()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for model in [given.model] if given.model else list(MODELS)[: 1 if given.quick else None]:
            folder = Path(scratch) / model
            write_model(folder, MODELS[model], torch.float32)
            for setting in TINY if given.quick else SETTINGS:
                if given.only in setting.name:
                    row = measure_alone(setting, model, folder)
                    for side in ("off", "auto"):
                        row[f"peak {side}"] = peak(setting, model, folder, side)
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    print(table(rows))
    found = {"machine": machine(), "threads": given.threads, "rows": rows}
    others = (busy_seconds() - time.process_time() - busy) / (time.monotonic() - started)
    print(f"{found['machine']}; cores busy with other programs and the children: {others:.2f}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
