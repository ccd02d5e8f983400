"""The engine's records per token, over HTTP too: sampling masks under top-p, routed experts."""

from __future__ import annotations

import pytest
from accounting_checks import samples_of
from workspace import LEARNING, Run, Workspace

from rlcore.launch.commands.init_model import ModelSpec, init_model
from rlcore.runs.rollouts import read_rollouts

TOP_P = (*LEARNING, "rollout.sampling.top_p=0.6", "rollout.sampling.top_k=12",
         "algorithm.minibatches=2", "training.steps=2", "algorithm.kl.loss_coef=0.1",
         "algorithm.estimator.name=remax")  # fmt: skip
KEEP = "policy.logprobs.keep_sets=true"
GAP = "rollout/train_rollout_logprob_diff"
LOGPROBS = "rollout_logprobs"


@pytest.fixture(scope="module")
def with_masks(workspace: Workspace) -> Run:
    run = workspace.train("keep_sets", *TOP_P, KEEP, "checkpoint.every=1", "checkpoint.keep=9")
    assert run.code == 0, run.err
    return run


def test_the_trainer_agrees_with_the_engine_on_truncated_responses(
    workspace: Workspace, with_masks: Run
) -> None:
    whole = workspace.train("no_keep_sets", *TOP_P, "training.steps=1")
    assert whole.lines("trained on as if they came from the whole one")
    assert all(row[GAP] < 1e-5 for row in with_masks.metrics)
    # The same responses, since they do not depend on what is told of them; over fewer tokens each
    # is more probable.
    pairs = zip(
        read_rollouts(with_masks.rollouts(1)), read_rollouts(whole.rollouts(1)), strict=True
    )
    assert all(
        a["tokens"] == b["tokens"] and sum(a[LOGPROBS]) > sum(b[LOGPROBS]) + 0.1 for a, b in pairs
    )
    assert with_masks.rows[1]["policy/entropy_avg"] < whole.rows[1]["policy/entropy_avg"] - 0.1
    samples = samples_of(with_masks, 2)
    assert all(
        sample.sampling_mask is not None and sample.sampling_mask.counts.max(initial=0) <= 12
        for sample in samples
    )
    assert any(
        sample.sampling_mask is not None and sample.sampling_mask.counts.any() for sample in samples
    )


def test_a_replay_scores_the_recorded_sets(workspace: Workspace, with_masks: Run) -> None:
    replay = workspace.replay(with_masks, 2)
    assert replay.code == 0, replay.err
    for name in (GAP, "loss/policy_avg", "train/grad_norm", "rollout/kl", "policy/entropy_avg"):
        assert replay.rows[1][name] == with_masks.rows[2][name], name
    refused = workspace.replay(with_masks, 2, "policy.logprobs.keep_sets=false")
    assert refused.code == 2
    assert "recorded with keep_sets: set policy.logprobs.keep_sets to true" in refused.err


@pytest.mark.full
def test_the_experts_of_the_engine_are_replayed(workspace: Workspace) -> None:
    folder = workspace.folder / "routed"
    init_model(
        folder,
        ModelSpec(
            family="qwen3_moe", hidden=32, layers=2, heads=4, kv_heads=2, intermediate=32, experts=4
        ),
    )
    model = (f"model.path={folder}", "policy.routing_replay=engine")
    run = workspace.train("routed", *TOP_P, *model, KEEP, "rollout.service=process")
    assert run.code == 0, run.err
    assert all(row[GAP] < 1e-5 for row in run.metrics)
    # Two optimizer steps a batch: the weights of the second are not the engine's any more.
    assert all(0 <= row["train/routing_replay_changed"] < 1 for row in run.metrics)
    samples = samples_of(run, 1)
    assert all(
        one.routed_experts is not None and one.routed_experts.shape == (len(one.tokens) - 1, 2, 2)
        for one in samples
    )
    replay = workspace.replay(run, 1)
    assert replay.code == 0, replay.err
    assert replay.rows[1]["train/grad_norm"] == run.rows[1]["train/grad_norm"]
    dense = workspace.train("dense", *TOP_P, "policy.routing_replay=engine")
    assert dense.code == 2
    assert "the qwen3 model has no experts to replay" in dense.err
