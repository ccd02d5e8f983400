"""Whole runs of `rlcore train` on the device: they learn, repeat themselves, resume, and share it.

They need more packages than the other sections: those that a machine lacks are named, and no run is
made.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from one_gpu.section import Found, Setting

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "addition"
NEEDED = ("aiohttp", "pyarrow", "rich", "xxhash", "yaml")
RUN_DEADLINE_S = 600.0
MEAN_GAP = 0.02  # nats, of bf16 log-probs, engine against trainer
LEARNED = 0.1  # of accuracy
STEPS = 6
KILLED_AT = 4


@dataclass
class Runs:
    """Runs in one folder, each a process."""

    setting: Setting
    deadline_s: float = RUN_DEADLINE_S

    def command(self, *arguments: str) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if not self.setting.cuda:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return subprocess.Popen(
            [sys.executable, "-m", "rlcore", *arguments],
            cwd=self.setting.work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def done(self, process: subprocess.Popen[bytes], *, expected: int = 0) -> None:
        try:
            out, _ = process.communicate(timeout=self.deadline_s)
            ended = f"exit code {process.returncode}"
        except subprocess.TimeoutExpired as late:
            out = late.stdout or b""
            ended = f"no end within {self.deadline_s:g} s"
        finally:
            process.kill()
        if process.returncode != expected:
            for log in sorted(self.setting.work.glob("runs/*/logs/*.log")):
                last = "\n    ".join(log.read_text(errors="replace").splitlines()[-4:])
                print(f"  {log.parent.parent.name}/{log.name}\n    {last}", flush=True)
            raise RuntimeError(f"{process.args}: {ended}\n{out.decode()[-6000:]}")

    def train(self, name: str, *arguments: str) -> float:
        """Make a run of the example. Returns its seconds."""
        began = time.perf_counter()
        self.done(self.command(*self._train(name, arguments)))
        return time.perf_counter() - began

    def start(self, name: str, *arguments: str, until: int) -> subprocess.Popen[bytes]:
        """Begin a run. Returns when it has logged `until` rows, or has ended."""
        process = self.command(*self._train(name, arguments))
        ends = time.monotonic() + self.deadline_s
        log = self.setting.work / "runs" / name / "metrics.jsonl"
        while not log.exists() or log.read_bytes().count(b"\n") < until:
            if process.poll() is not None or time.monotonic() > ends:
                break
            time.sleep(0.02)
        return process

    def train_killed(self, name: str, *arguments: str) -> None:
        """Kill the run's processes after a step, and resume it."""
        process = self.start(name, *arguments, until=KILLED_AT)
        for each in (*psutil.Process(process.pid).children(recursive=True), process):
            each.send_signal(signal.SIGKILL)
        self.done(process, expected=-signal.SIGKILL)
        self.done(self.command(*self._train(name, arguments), "--resume"))

    @staticmethod
    def _train(name: str, arguments: tuple[str, ...]) -> list[str]:
        return ["train", *arguments, f"run.name={name}", "run.dir=runs"]

    def rows(self, name: str) -> list[dict[str, Any]]:
        from rlcore.runs.metrics import read_metrics

        path = self.setting.work / "runs" / name / "metrics.jsonl"
        return read_metrics(path) if path.exists() else []

    def learned(self, name: str) -> list[dict[str, Any]]:
        """The rows of the log, without what depends on the clock and on processes."""
        unlike = ("time/", "perf/", "rollout/engine", "rollout/retried", "rollout/resumed")
        return [
            {key: value for key, value in row.items() if not key.startswith(unlike)}
            for row in self.rows(name)
        ]

    def weights(self, name: str) -> bytes:
        return (self.setting.work / "runs" / name / "hf" / "model.safetensors").read_bytes()


def whole_runs(setting: Setting) -> Found:
    """Make the runs, several at a time."""
    found = Found()
    if lacks_packages(found):
        return found
    runs = Runs(setting)
    prepare(runs)
    grpo = [str(EXAMPLE / "base.yaml"), str(EXAMPLE / "grpo.yaml")]
    dtype = f"model.dtype={setting.size.dtype}"
    alike = (
        *grpo, dtype, "run.deterministic=true", f"training.steps={STEPS}", "checkpoint.every=2",
        "evaluation.every=0", "evaluation.paths=[]", "policy.optimizer.lr=1e-3",
    )  # fmt: skip
    apart = ("rollout.service=process", "rollout.engine.colocated=true")
    warmup = 20 if setting.toy else 400
    with ThreadPoolExecutor(5) as pool:
        made = {
            "a run of 6 steps": pool.submit(runs.train, "one", *alike),
            "again": pool.submit(runs.train, "again", *alike),
            "colocated": pool.submit(runs.train, "colocated", *alike, *apart),
            "killed": pool.submit(runs.train_killed, "killed", *alike),
            f"warm-up, {warmup} steps": pool.submit(
                runs.train, "warmup", str(EXAMPLE / "sft.yaml"), f"training.steps={warmup}"
            ),
        }
        for name, future in made.items():
            if (seconds := future.result()) is not None:
                found.number(f"runs: {name}", seconds, "s", "beside each other")
    for name in ("again", "colocated", "killed"):
        differs = runs.learned(name) != runs.learned("one") or (
            runs.weights(name) != runs.weights("one")
        )
        if differs:
            _show_differences(runs, name)
        found.check(f"runs: {name} differs from the first", float(differs), 0.0)
    gap = max(row["rollout/train_rollout_logprob_diff"] for row in runs.rows("one"))
    found.check("runs: mean log-prob gap of the worst step", gap, MEAN_GAP)
    _learn(runs, grpo, found)
    return found


def lacks_packages(found: Found) -> bool:
    """Whether this machine has too few packages for a run; says which."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        found.numbers["not made, for want of"] = missing
        print(f"  no runs are made: this machine lacks {', '.join(missing)}", flush=True)
    return bool(missing)


def prepare(runs: Runs) -> None:
    """Write the example's model and data."""
    model = runs.command("init-model", "build/addition/model", "--preset", "addition")
    data = subprocess.Popen(
        [sys.executable, str(EXAMPLE / "make_data.py"), "build/addition/data"],
        cwd=runs.setting.work,
    )
    runs.done(model)
    runs.done(data)


def _show_differences(runs: Runs, name: str) -> None:
    for row, other in zip(runs.learned("one"), runs.learned(name)):
        for key in sorted(row.keys() | other.keys()):
            if row.get(key) != other.get(key):
                print(f"    step {row['step']} {key}: {row.get(key)} {other.get(key)}", flush=True)


def _learn(runs: Runs, grpo: list[str], found: Found) -> None:
    """The quickstart's second half, on one rank."""
    toy = runs.setting.toy
    steps = ("training.steps=2", "evaluation.every=2") if toy else ()
    seconds = runs.train("learns", *grpo, "policy.checkpoint=runs/warmup", *steps)
    rows = runs.rows("learns")
    accuracy = [row["eval/accuracy"] for row in rows if "eval/accuracy" in row]
    found.number("runs: the addition example by GRPO", seconds, "s", f"{len(rows) - 1} steps")
    found.number("runs: accuracy before", accuracy[0], "")
    found.number("runs: accuracy after", accuracy[-1], "")
    if not toy:
        found.check("runs: accuracy that is missing", LEARNED - (accuracy[-1] - accuracy[0]), 0.0)
    for key in ("perf/mfu", "time/step", "time/generation", "time/training", "time/publish"):
        if values := sorted(row[key] for row in rows if key in row):
            found.number(f"runs: {key}", values[len(values) // 2], "", "median of the steps")
