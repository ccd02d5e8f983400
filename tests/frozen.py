"""Writes what a user can see of this tree, so that two commits can be compared by `diff -r`.

    python tests/frozen.py FOLDER [PART ...]

Resolved configurations of the examples, help of every command, keys, metrics, public names, texts
for bad input, and of short runs their files, metrics without clocks, and digests of the weights.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "integration")]
ON_TOP = re.compile(r"^#.*goes on top of (\S+\.yaml)", re.IGNORECASE | re.MULTILINE)
CLOCKS = ("time/", "perf/")
PUBLIC = (
    "backends.megatron", "rlcore.algorithms", "rlcore.algorithms.testing", "rlcore.config",
    "rlcore.data.curriculum", "rlcore.tracking", "rollout.engines.testing", "rollout.workflows.env",
)  # fmt: skip
PPO = (
    "algorithm.estimator={name: ppo}", "critic.path=MODEL", "algorithm.minibatches=2",
    "algorithm.kl.reward_coef=0.1", "algorithm.kl.loss_coef=0.1", "algorithm.entropy_coef=0.01",
)  # fmt: skip
TWO_RANKS = ("cluster.processes_per_node=2",)
RUNS: dict[str, tuple[str, ...]] = {
    "grpo": ("rollout.service=in_process",),
    "grpo, service in a process": ("rollout.service=process",),
    "ppo, tensor": (*PPO, *TWO_RANKS, "policy.parallel.tensor=2"),
    "ppo, pipeline": (*PPO, *TWO_RANKS, "policy.parallel.pipeline=2"),
    "grpo, data": (*TWO_RANKS, "algorithm.correction.name=tis"),
}  # fmt: skip


def configurations() -> Iterator[tuple[str, str]]:
    from rlcore.config.load import load_config

    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        below = [path.parent / name for name in ON_TOP.findall(path.read_text())]
        part = path.name in ("base.yaml", "data.yaml")
        given = ["run.name=part", "data.paths=rows.jsonl", "training.steps=1"] if part else []
        config = load_config([*below, path], given).config
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=True)
        yield str(path.relative_to(ROOT / "examples")).replace("/", "+"), text


def commands() -> Iterator[tuple[str, str]]:
    from rlcore.cli import COMMANDS

    os.environ["COLUMNS"] = "100"
    for name in COMMANDS:
        yield f"help {name}", output("rlcore", name, "--help")
    yield "keys", output("rlcore", "config")
    yield "metrics", output("rlcore", "metrics")


def output(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return f"exit code {done.returncode}\n{done.stdout}{done.stderr}"


def public_names() -> Iterator[tuple[str, str]]:
    lines = []
    for name in PUBLIC:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            value = getattr(module, public)
            exception = inspect.isclass(value) and issubclass(value, BaseException)
            signature = str(inspect.signature(value)) if callable(value) and not exception else ""
            lines.append(f"{name}.{public}{signature}")
    yield "public names", "\n".join(lines) + "\n"


def refusals(folder: Path) -> Iterator[tuple[str, str]]:
    from test_bad_input import REFUSED, make_scene
    from workspace import Workspace

    scene = make_scene(Workspace(folder, model(folder)))
    lines = []
    for name, (arguments, _) in REFUSED.items():
        run = scene.workspace.train("refused", *arguments(scene))
        lines.append(f"## {name}: exit code {run.code}\n{run.err.replace(str(folder), 'FOLDER')}")
    yield "refusals", "\n".join(lines)


def model(folder: Path) -> Path:
    from rlcore.launch.commands.init_model import ModelSpec, init_model

    init_model(
        folder / "model", ModelSpec(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=64)
    )
    return folder / "model"


def runs(folder: Path) -> Iterator[tuple[str, str]]:
    from workspace import Workspace

    workspace = Workspace(folder, model(folder))
    for name, given in RUNS.items():
        arguments = [one.replace("MODEL", str(workspace.reward_model)) for one in given]
        command = ["rlcore", "train", str(workspace.base), f"run.name={name}", *arguments]
        said = output(*command)
        run = folder / "runs" / name
        yield f"run {name}", "\n".join(described(run, said)) + "\n"


def described(run: Path, said: str) -> Iterator[str]:
    yield said if said.startswith("exit code 1") else said.splitlines()[0]
    files = sorted(path for path in run.rglob("*") if path.is_file())
    yield from (str(path.relative_to(run)) for path in files if "timeline" not in path.parts)
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row: dict[str, Any] = json.loads(line)
        kept = {key: row[key] for key in sorted(row) if not key.startswith(CLOCKS)}
        yield json.dumps(kept)
    for path in sorted((run / "hf").glob("*.safetensors")):
        yield f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}"


PARTS: dict[str, Callable[[Path], Iterator[tuple[str, str]]]] = {
    "configurations": lambda folder: configurations(),
    "commands": lambda folder: commands(),
    "names": lambda folder: public_names(),
    "refusals": refusals,
    "runs": runs,
}


def main() -> None:
    target = Path(sys.argv[1])
    for part in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as folder:
            for name, text in PARTS[part](Path(folder)):
                (target / part).mkdir(parents=True, exist_ok=True)
                (target / part / name).write_text(text)
                print(f"{part}/{name}")
    if not sys.argv[2:]:
        for part in PARTS:
            # runs leave process groups and plugins behind
            subprocess.run([sys.executable, __file__, str(target), part], check=True)


if __name__ == "__main__":
    main()
