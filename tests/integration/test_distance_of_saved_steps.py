"""How far each step of a run moved its policy: transformers finds it from the saved weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accounting_checks import samples_of
from hf_logprobs import logprobs, policy_before
from workspace import LEARNING, Run, Workspace, same

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.training import passes

EVERY_WEIGHT = (
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "checkpoint.export_hf=false",
    "policy.max_tokens_per_microbatch=4096",
)
CONSTANT = {"policy/approxkl_avg", "policy/clipfrac_avg", "val/ratio", "val/ratio_var"}


def distance(workspace: Workspace, run: Run, step: int) -> float:
    """The distance over all tokens of a step, which are one micro-batch."""
    samples = samples_of(run, step)
    before, after = (
        torch.cat(logprobs(policy_before(workspace, run, at), samples)) for at in (step, step + 1)
    )
    return 0.5 * float((after - before).square().mean())


@pytest.mark.parametrize(
    ("options", "one_update"),
    [
        pytest.param((), True, marks=pytest.mark.everyday),
        (("algorithm.epochs=2",), False),
        (("algorithm.epochs=2", "algorithm.old_logprobs=rollout"), False),
        (("algorithm.old_logprobs=recompute",), True),
        (
            ("algorithm.estimator.name=ppo", "critic.optimizer.lr=1e-3", "critic.warmup_steps=1"),
            True,
        ),
    ],
    ids=["one update", "two", "two from the engine's", "a pass before", "critic first"],
)
def test_the_distance_is_that_of_the_saved_weights(
    workspace: Workspace, options: tuple[str, ...], one_update: bool, tmp_path: Path
) -> None:
    run = workspace.train(f"moved-{tmp_path.name}", *LEARNING, *EVERY_WEIGHT, *options)
    assert run.code == 0, run.err
    first = 2 if "critic.warmup_steps=1" in options else 1
    assert [row["step"] for row in run.metrics if "policy/step_kl" not in row] == [1][: first - 1]
    for step in range(first, 4):
        row = run.rows[step]
        expected = distance(workspace, run, step)
        assert expected > 1e-6
        assert same(row["policy/step_kl"], expected, rel=1e-3), step
        assert CONSTANT & row.keys() == (set() if one_update else CONSTANT)


def test_a_few_sequences_are_compared_with_their_own_log_probs(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of nearly nothing: log-probs of other tokens would differ by whole nats."""
    monkeypatch.setattr(passes, "MEASURED_TOKENS", 4)
    monkeypatch.setattr(passes, "MEASURED_SHARE", 0.0)
    given = ("policy.max_tokens_per_microbatch=4096", "training.steps=6", "checkpoint.every=0")
    run = workspace.train("excerpts", "policy.optimizer.lr=1e-9", *given)
    assert run.code == 0, run.err
    for step in range(1, 7):
        assert run.rows[step]["train/grad_norm"] > 0
        assert run.rows[step]["policy/step_kl"] < 1e-9


def test_a_step_without_a_signal_has_moved_nothing(workspace: Workspace) -> None:
    run = workspace.train("still", *LEARNING, "reward.parts.liked.weight=0", "training.steps=2")
    assert run.code == 0, run.err
    for row in run.metrics:
        assert row["train/updates_without_signal"] == row["train/optimizer_steps"] == 1
        assert row["policy/step_kl"] == 0.0
