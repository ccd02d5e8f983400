"""A run on two context-parallel ranks is the run of one process, from rollouts to export."""

from __future__ import annotations

import math

import pytest
from rank_runs import RankRuns
from workspace import LEARNING, Workspace, same

from backends.megatron.cpu.shim import importing_megatron

with importing_megatron():
    from backends.megatron.checkpoint.save_load import saved_layout

PPO = (
    *LEARNING, "algorithm.estimator.name=ppo", "algorithm.kl.reward_coef=0.01",
    "algorithm.minibatches=2", "critic.optimizer.lr=1e-3", "checkpoint.every=3",
    "rollout.service=in_process",
)  # fmt: skip
CONTEXT = ("policy.parallel.context=2",)
TIMES = ("time/", "perf/", "publish/")


def test_metrics_are_those_of_one_process(workspace: Workspace, rank_runs: RankRuns) -> None:
    one = workspace.train("context-one", *PPO)
    two = rank_runs.train("context-two", *PPO, *CONTEXT)
    assert (one.code, two.code) == (0, 0), two.said
    assert two.lines("x CP 2 on 2 cpu ranks"), two.said
    assert len(two.rows) == 3
    for row, other in zip(one.metrics, two.rows, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            if isinstance(value, float) and not key.startswith(TIMES):
                both_nan = math.isnan(value) and math.isnan(other[key])
                assert both_nan or same(value, other[key], rel=1e-4, abs_=1e-6), (
                    row["step"],
                    key,
                    value,
                    other[key],
                )


@pytest.mark.full
def test_it_resumes_in_one_process(workspace: Workspace, rank_runs: RankRuns) -> None:
    whole = workspace.train("context-whole", *PPO, "training.steps=4")
    cut = rank_runs.train(
        "context-cut", *PPO, *CONTEXT, "training.steps=3", "policy.optimizer.distributed=true"
    )
    assert cut.code == 0, cut.said
    assert saved_layout(cut.folder / "checkpoints" / "step_000003" / "model").endswith("x CP 2")
    resumed = workspace.train(
        "context-cut", *PPO, "training.steps=4", "policy.optimizer.distributed=true", "--resume"
    )
    assert resumed.code == 0, resumed.err
    for key in ("objective/scores", "loss/policy_avg", "loss/value_avg", "train/grad_norm"):
        assert same(whole.rows[4][key], resumed.rows[4][key], rel=1e-4, abs_=1e-6), key
