"""Whole runs that learn from preferences: a step against transformers in float64, held-out rows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from workspace import Run, Workspace

from rlcore.algorithms.estimators.preferences import Answers, PreferenceEstimator
from rlcore.launch.commands.init_model import ModelSpec, init_model

# An AdamW step that is linear in the gradient: delta = lr g / (|g| + eps).
LR, EPS = 1e6, 1e3
LINEAR = f"policy.optimizer={{lr: {LR}, eps: {EPS}, weight_decay: 0.0, clip_grad: 0.0}}"
ROWS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(abs(a - b)) + "00"[: a % 3]}
        for a, b in ((1, 2), (30, 4), (5, 60), (70, 8), (9, 10), (11, 12), (3, 14))]  # fmt: skip
BETA = 0.4


def nll(x: Tensor) -> Tensor:
    return -torch.log(torch.sigmoid(x))


def dpo(c: Tensor, r: Tensor, pc: Tensor, pr: Tensor, *_: int) -> Tensor:
    return nll(BETA * ((c - pc) - (r - pr)))


def simpo(c: Tensor, r: Tensor, pc: Tensor, pr: Tensor, n: int, m: int) -> Tensor:
    return nll(2.0 * (c / n - r / m) - 0.5)


@pytest.fixture(scope="module")
def pairs(workspace: Workspace) -> Path:
    path = workspace.folder / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return path


@pytest.fixture(scope="module")
def other(workspace: Workspace) -> Path:
    """A reference that is not the policy: with the policy all margins would be 0."""
    folder = workspace.folder / "other_model"
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64}
    init_model(folder, ModelSpec(seed=7, **sizes))
    return folder


def train(workspace: Workspace, name: str, pairs: Path, *arguments: str) -> Run:
    run = workspace.command(
        "train", f"run.name={name}", f"run.dir={workspace.folder / 'runs'}", "run.threads=1",
        f"model.path={workspace.model}", "model.dtype=fp32", f"data.paths={pairs}",
        f"training.batch_size={len(ROWS)}", "policy.max_tokens_per_microbatch=24", *arguments,
        name=name,
    )  # fmt: skip
    assert run.code == 0, run.err
    return run


def answers(folder: Path, tokenizer: Any, *, gradients: bool) -> tuple[Any, list[Tensor]]:
    """transformers' model, and the log-prob of each chosen and each rejected answer in turn."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model.requires_grad_(gradients)
    found = []
    for row in ROWS:
        for key in ("chosen", "rejected"):
            prompt = tokenizer.encode(row["prompt"])
            ids = [*prompt, *tokenizer.encode(row[key]), tokenizer.eos_token_id]
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
            each = logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
            found.append(each[len(prompt) - 1 :])
    return model, found


def expected(
    workspace: Workspace, other: Path, loss: Callable[..., Tensor]
) -> tuple[float, dict[str, Tensor]]:
    tokenizer = AutoTokenizer.from_pretrained(workspace.model)
    model, found = answers(workspace.model, tokenizer, gradients=True)
    _, before = answers(other, tokenizer, gradients=False)
    sums = [part.sum() for part in found]
    reference = [part.sum() for part in before]
    lengths = [len(part) for part in found]
    losses = [
        loss(*sums[i : i + 2], *reference[i : i + 2], *lengths[i : i + 2])
        for i in range(0, len(sums), 2)
    ]
    mean = torch.stack(losses).mean()
    mean.backward()
    return float(mean.detach()), {name: p.grad for name, p in model.named_parameters()}


LAYOUTS = {
    "one rank": (),
    # whose micro-batches, of 24 tokens, part the answers of pairs
    "two replicas": ("cluster.processes_per_node=2",),
}


@pytest.mark.parametrize(
    ("name", "estimator", "loss", "layout"),
    [
        ("dpo", f"{{name: dpo, beta: {BETA}}}", dpo, "one rank"),
        ("dpo of replicas", f"{{name: dpo, beta: {BETA}}}", dpo, "two replicas"),
        ("simpo", "{name: simpo, beta: 2.0, gamma: 0.5}", simpo, "one rank"),
    ],
)
def test_a_step_equals_transformers(
    name: str, estimator: str, loss: Callable[..., Tensor], layout: str,
    workspace: Workspace, pairs: Path, other: Path,
) -> None:  # fmt: skip
    run = train(
        workspace, name, pairs, f"algorithm.estimator={estimator}", f"reference.path={other}",
        "training.steps=1", LINEAR, f"evaluation.paths={pairs}", "evaluation.at_end=false",
        *LAYOUTS[layout],
    )  # fmt: skip
    value, gradients = expected(workspace, other, loss)
    assert run.rows[1]["preference/loss"] == pytest.approx(value, rel=1e-5)
    # the same rows are held out, and scored before the step
    assert run.rows[0]["eval/preference_loss"] == pytest.approx(value, rel=1e-5)
    for key in ("accuracy", "margin", "chosen_logprob", "rejected_logprob"):
        held_out = run.rows[0][f"eval/preference_{key}"]
        assert run.rows[1][f"preference/{key}"] == pytest.approx(held_out, rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(workspace.model, dtype=torch.float64)
    before = dict(model.named_parameters())
    weights = run.weights
    for key, gradient in gradients.items():
        delta = before[key].detach() - weights[key].double()
        found = EPS * delta / (LR - delta.abs())
        assert (found - gradient).norm() <= 1e-4 * gradient.norm(), key
    assert not {"rollout/kl", "objective/kl"} & run.rows[1].keys()


@pytest.mark.parametrize("name", ["ipo", "kto", "orpo"])
def test_the_others_take_a_step(name: str, workspace: Workspace, pairs: Path) -> None:
    estimator = f"algorithm.estimator.name={name}"
    run = train(workspace, f"a step of {name}", pairs, estimator, "training.steps=1")
    assert run.rows[1]["train/grad_norm"] > 0
    assert math.isfinite(run.rows[1]["preference/loss"])
    assert ("preference/accuracy" in run.rows[1]) is (name != "kto")


class Calibrated(PreferenceEstimator):
    """A preference loss of a user: squared margins about 1."""

    needs = frozenset({"logprobs", "ref_logprobs"})

    def rewards(self, answers: Answers) -> Tensor:
        return answers.ratios

    def losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        return (self.rewards(chosen) - self.rewards(rejected) - 1) ** 2


def test_a_loss_of_ones_own_takes_a_step(workspace: Workspace, pairs: Path) -> None:
    own = (f"algorithm.estimator.name={__name__}:Calibrated", "data.format=preference")
    run = train(workspace, "a loss of one's own", pairs, *own, "training.steps=1")
    # policy and reference are the same before the step
    assert run.rows[1]["preference/loss"] == pytest.approx(1, abs=1e-6)
    assert run.rows[1]["train/grad_norm"] > 0


def test_adapters_learn_from_the_model_without_them(workspace: Workspace, pairs: Path) -> None:
    run = train(
        workspace, "dpo of adapters", pairs, "algorithm.estimator={name: dpo, beta: 0.5}",
        "training.steps=12", "policy.lora={rank: 4, alpha: 8}", "policy.optimizer.lr=2e-2",
        "checkpoint.best={metric: eval/preference_loss, mode: min}",
        f"evaluation={{paths: {pairs}, every: 4}}",
    )  # fmt: skip
    assert run.rows[1]["preference/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert run.rows[12]["eval/preference_loss"] < 0.3
    assert run.rows[12]["eval/preference_accuracy"] == 1.0
    assert run.result["best"]["metric"] == "eval/preference_loss"


def test_supervised_runs_score_held_out_labels(workspace: Workspace) -> None:
    run = workspace.sft("sft with held-out rows", workspace.heldout, "evaluation.every=2")
    assert run.code == 0, run.err
    losses = [row["eval/loss"] for row in run.metrics if "eval/loss" in row]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
