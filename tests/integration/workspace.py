"""Runs of the whole loop in this process, on a model of 2 layers: about a second each."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rlcore import cli
from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.runs.metrics import read_metrics
from tests.integration.json_server import answering

ROOT = Path(__file__).resolve().parents[2]
CLOCKS = ("time/", "perf/")  # metrics that no two runs share
OF_ENGINES = ("rollout/engine", "rollout/retried", "rollout/resumed")  # that were lost
LEARNING = ("policy.optimizer.lr=3e-3",)  # large enough that a few steps move the policy visibly


@dataclass(frozen=True)
class Run:
    """The end of a command, and what its run left behind."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.folder / "metrics.jsonl")

    @property
    def rows(self) -> dict[int, dict[str, Any]]:
        return {row["step"]: row for row in self.metrics}

    @property
    def result(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.folder / "result.json").read_bytes())
        return content

    @property
    def exported(self) -> Path:
        """The weights of its last step."""
        return self.folder / "hf" / "model.safetensors"

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.exported)

    def checkpoint(self, step: int) -> Path:
        return self.folder / "checkpoints" / f"step_{step:06d}"

    def rollouts(self, step: int) -> Path:
        return self.folder / "rollouts" / f"step_{step:06d}.parquet"

    def lines(self, text: str) -> list[str]:
        """Return the lines of the terminal that hold `text`."""
        return [line for line in (self.out + self.err).splitlines() if text in line]


class Workspace:
    """A folder with a model, a reward model, addition problems and a configuration for all runs.

    Rewards come from a server with the classify route of SGLang: they differ between any two
    responses, and need no worker process. The reward model serves as a critic.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        sys.path.insert(0, str(ROOT / "examples" / "addition"))
        from make_data import make

        self.folder = folder
        self.model = model
        self.replays = 0
        self.named: dict[str, str] = {}  # the file of tests whose run has the name
        self.reward_model = folder / "reward_model"
        make_classifier(model, self.reward_model)
        make(folder / "data")
        self._servers = ExitStack()
        url = self._servers.enter_context(answering(classify))
        self.heldout = f"evaluation.paths=[{folder / 'data' / 'heldout.jsonl'}]"
        self.base = folder / "base.yaml"
        self.base.write_text(f"""
run: {{dir: {folder / "runs"}, threads: 1}}
model: {{path: {model}, dtype: fp32}}
data: {{paths: {folder / "data" / "train.jsonl"}}}
policy: {{optimizer: {{lr: 1.0e-3}}, max_tokens_per_microbatch: 256}}
rollout: {{service: in_process, prompts_per_step: 4, samples_per_prompt: 4,
          sampling: {{max_new_tokens: 6}}}}
reward: {{parts: {{liked: {{service: {{url: "{url}/classify", format: sglang, batch_size: 16}}}}}}}}
training: {{steps: 3}}
tracking: {{show_samples: 0}}
""")

    def train(self, name: str, *arguments: str) -> Run:
        """Run `rlcore train base.yaml run.name=NAME ARGUMENTS`."""
        return self.command("train", str(self.base), f"run.name={name}", *arguments, name=name)

    def sft(self, name: str, *arguments: str) -> Run:
        given = (f"run.name={name}", f"run.dir={self.folder / 'runs'}", "run.threads=1",
                 f"model.path={self.model}", "model.dtype=fp32",
                 f"data.paths={self.folder / 'data' / 'train.jsonl'}", "algorithm.loss.name=sft",
                 "training.steps=4", "training.batch_size=16", "policy.optimizer.lr=1e-3",
                 *arguments)  # fmt: skip
        return self.command("train", *given, name=name)

    def chat_model(self) -> Path:
        """A model with a chat template and a symbol for each letter; the first call makes it."""
        folder = self.folder / "chat_model"
        if not folder.exists():
            sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64}
            init_model(folder, ModelSpec.preset("ascii", chat=True, max_positions=4096, **sizes))
        return folder

    def replay(self, run: Run, step: int, *arguments: str) -> Run:
        """Train on a recorded step once more, from the weights that it was made with."""
        self.replays += 1
        name = f"replay {self.replays}"
        start = (f"training.replay_from={run.checkpoint(step - 1)}",) if step > 1 else ()
        return self.command(
            "train", str(run.folder / "config.yaml"), f"run.name={name}",
            "training.debug=train_only", "training.steps=1",
            f"training.replay={run.rollouts(step)}", *start, *arguments, name=name,
        )  # fmt: skip

    def command(self, *arguments: str, name: str = "") -> Run:
        """Run any `rlcore` command, for the run `name` if it is of one."""
        if name:
            where = os.environ["PYTEST_CURRENT_TEST"].partition("::")[0]
            used = self.named.setdefault(name, where)
            assert used == where, f"{used} has a run {name!r} too: call this one otherwise"
        out = io.StringIO()
        err = io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = cli.main(list(arguments))
        return Run(code, out.getvalue(), err.getvalue(), self.folder / "runs" / name)


def score_of(text: str) -> float:
    """A learnable reward of a prompt with its response: the mean weight of its characters.

    The last term makes the rewards of different texts differ.
    """
    weights = [zlib.crc32(character.encode()) / (1 << 29) - 4 for character in text]
    return sum(weights) / len(weights) + zlib.crc32(text.encode()) / (1 << 42)


def classify(path: str, headers: Mapping[str, str], body: Any) -> tuple[int, Any]:
    """Answer as SGLang's classify route does."""
    return 200, [{"embedding": [score_of(text)]} for text in body["text"]]


def make_classifier(model: Path, folder: Path, *, seed: int = 5) -> None:
    """Make a sequence classifier with one output, on the architecture of `model`."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(model, num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        classifier = AutoModelForSequenceClassification.from_config(config)
        torch.nn.init.normal_(classifier.score.weight, std=0.5)
    classifier.save_pretrained(folder)


def learned(
    rows: Iterable[Mapping[str, Any]], *, without: tuple[str, ...] = ()
) -> list[dict[str, str]]:
    """Metrics as text, to the bit, but for what the clock writes and what begins with `without`."""
    return [
        {name: repr(value) for name, value in row.items() if not name.startswith(CLOCKS + without)}
        for row in rows
    ]


def same(a: float, b: float, *, rel: float = 1e-5, abs_: float = 1e-7) -> bool:
    return math.isclose(a, b, rel_tol=rel, abs_tol=abs_)
