"""The calculators of examples/ in runs: their data, and a small model that has seen calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.workspace import ROOT, Run, Workspace

CALCULATOR = ROOT / "examples" / "calculator"  # the environment
AGENT = ROOT / "examples" / "agent"  # the program
BASE = str(CALCULATOR / "base.yaml")
ENV_RUN = (BASE, str(CALCULATOR / "grpo.yaml"), "run.threads=1")
AGENT_RUN = (BASE, str(AGENT / "grpo.yaml"), "run.threads=1")
WARM = "runs/calculator-warmup"  # below the folder with the data


def make_data(folder: Path) -> Path:
    """Write the example's data below `folder`; return where."""
    data = folder / "build" / "calculator" / "data"
    subprocess.run([sys.executable, str(CALCULATOR / "make_data.py"), str(data)], check=True)
    return data


def think(data: Path) -> None:
    """Put a thought before every answer of the warm-up."""
    path = data / "warmup.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for message in (m for row in rows for m in row["messages"] if m["role"] == "assistant"):
        message["content"] = f"<think>hm</think>{message['content'] or ''}"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def warm_up(workspace: Workspace, *, steps: int = 120) -> None:
    """Make a model in the current folder, whose data is there, and train it to call tools."""
    commands = (
        ("init-model", "build/calculator/model", "--preset=ascii", "--chat", "--hidden=64",
         "--layers=2", "--intermediate=128"),
        ("train", BASE, str(CALCULATOR / "sft.yaml"), "run.threads=1", "training.batch_size=16",
         "policy.optimizer.lr=4e-3", f"training.steps={steps}"),
    )  # fmt: skip
    for command in commands:
        done = workspace.command(*command)
        assert done.code == 0, done.err


def train(workspace: Workspace, name: str, *arguments: str) -> Run:
    """Run to the end, in the current folder."""
    done = workspace.command("train", *arguments, f"run.name={name}")
    assert done.code == 0, done.err
    return Run(done.code, done.out, done.err, Path.cwd() / "runs" / name)
