"""Conversations with tools over a real server: its log-probs, and what it computes again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlcore.data.sample import Sample
from tests.integration.accounting_checks import check_accounting, samples_of
from tests.integration.workspace import ROOT, Run, Workspace

FOLDER = ROOT / "examples" / "calculator"
BASE = str(FOLDER / "base.yaml")
GAP = "rollout/train_rollout_logprob_diff"
ENGINE = (
    "rollout.engine={kind: sglang, device: cpu, threads: 1, start_timeout_s: 400,"
    " request_timeout_s: 120}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the example's data, and a small model that has seen a few conversations."""
    folder = tmp_path_factory.mktemp("calculator")
    data = folder / "build" / "calculator" / "data"
    subprocess.run([sys.executable, str(FOLDER / "make_data.py"), str(data)], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(FOLDER))
        yield folder
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained(
    folder: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Run, Path]:
    """A run of two steps over a server that it starts, and the weights with which it began."""
    workspace = Workspace(tmp_path_factory.mktemp("workspace"), tiny_model)
    made = workspace.command(
        "init-model", "build/calculator/model", "--preset=ascii", "--chat", "--hidden=64",
        "--layers=2", "--intermediate=128",
    )  # fmt: skip
    assert made.code == 0, made.err
    warm = workspace.command(
        "train", BASE, str(FOLDER / "sft.yaml"), "run.threads=1", "training.batch_size=16",
        "policy.optimizer.lr=3e-3", "training.steps=60",
    )  # fmt: skip
    assert warm.code == 0, warm.err
    warmed = folder / "runs" / "calculator-warmup"
    done = workspace.command(
        "train", BASE, str(FOLDER / "grpo.yaml"), "run.threads=1", "run.name=served",
        "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4", "training.steps=2",
        "evaluation=null", f"policy.checkpoint={warmed}", ENGINE,
    )  # fmt: skip
    assert done.code == 0, done.err
    return Run(done.code, done.out, done.err, folder / "runs" / "served"), warmed / "hf"


def test_each_trained_token_has_the_log_prob_of_transformers(trained: tuple[Run, Path]) -> None:
    run, weights = trained
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
    samples = samples_of(run, 1)
    assert max(sample.turns for sample in samples) > 1, "the warm-up was too short for calls"
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            logprobs = model(tokens[None]).logits[0, :-1].float().log_softmax(-1)
        chosen = logprobs.gather(1, tokens[1:, None])[:, 0].numpy()
        np.testing.assert_allclose(
            sample.rollout_logprobs, chosen[sample.loss_mask[1:] == 1], atol=1e-4
        )


def test_a_run_over_conversations(trained: tuple[Run, Path]) -> None:
    run, _ = trained
    check_accounting(run, steps=2)
    for step in (1, 2):
        row = run.rows[step]
        assert row[GAP] < 1e-4
        assert row["conversation/turns"] > 1
        assert row["conversation/tool_calls"] > 0
        assert row["conversation/merge_ratio"] == 1.0


def test_a_turn_computes_only_what_is_new(trained: tuple[Run, Path]) -> None:
    """From the second turn on: the suffix, and the last token of the turn before, which was drawn
    and never fed.
    """
    run, _ = trained
    for step in (1, 2):
        for sample in samples_of(run, step):
            measured = sample.measured
            asked = int(measured["turns"])
            assert measured["prefilled_tokens"] <= measured["context_tokens"] + asked - 1
            sent = measured["cached_tokens"] + measured["prefilled_tokens"]
            assert sent == sum(prompts(sample))


def prompts(sample: Sample) -> list[int]:
    """The lengths of the prompts of all turns: what stands before each."""
    trained = np.flatnonzero(sample.loss_mask)
    return [int(trained[span.start]) for span in sample.turn_spans]
