"""Branching conversations with turn rewards, under PPO: credit, KL, early stop and replay."""

from __future__ import annotations

import pytest
import torch
from accounting_checks import samples_of
from hf_logprobs import logprobs, policy_before, scores
from torch import Tensor
from workspace import LEARNING, Run, Workspace

from rlcore.data.sample import Sample
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import read_rollouts
from rollout.accounting.audit import audit

GAMMA = 0.9
LAM = 0.8
ROLLOUTS = 16
PPO = (
    *LEARNING, "rollout.workflow=rewarded_branches:RewardedBranches",
    f"algorithm.estimator={{name: ppo, gamma: {GAMMA}, lam: {LAM}}}",
    "algorithm.normalize_advantages=none", "critic.optimizer.lr=1e-3",
    "algorithm.kl.reward_kind=k3", "training.early_stopping=true", "training.target_kl=1e-9",
    "training.steps=4", "checkpoint.every=1", "checkpoint.keep=9",
)  # fmt: skip


@pytest.fixture(scope="module")
def stopped(workspace: Workspace) -> Run:
    """Stops behind step 2, the first whose policy is not the reference."""
    run = workspace.train("turn rewards", *PPO, f"critic.path={workspace.reward_model}")
    assert run.code == 0, run.err
    return run


def rollouts_of(run: Run, step: int) -> list[list[Sample]]:
    """The samples of each rollout, in the order in which they were made."""
    found: dict[int, list[Sample]] = {}
    for sample in samples_of(run, step):
        found.setdefault(sample.rollout_id, []).append(sample)
    assert len(found) == ROLLOUTS
    return list(found.values())


def test_turn_rewards_reach_generalised_advantages(workspace: Workspace, stopped: Run) -> None:
    """Compared with GAE by hand; at step 1 the critic is the reward model."""
    advantages = iter(record["advantages"] for record in read_rollouts(stopped.rollouts(1)))
    for first, last in rollouts_of(stopped, 1):
        assert (first.turns, last.turns) == (2, 2)
        assert [span.turn for span in first.turn_spans] == [0, 1]
        assert [span.turn for span in last.turn_spans] == [2]
        turns = [-0.5, 0.25 * (own_index(first) + 1), 0.5 * (own_index(first) + 1)]
        ends = [span.end - 1 for span in first.turn_spans]
        # the segment's own turns, and the outcome with what later segments earn
        earned = torch.zeros(first.num_trainable, dtype=torch.float64)
        earned[ends] += torch.tensor(turns[:2], dtype=torch.float64)
        earned[-1] += first.reward + turns[2]
        alone = torch.zeros(last.num_trainable, dtype=torch.float64)
        alone[-1] += last.reward + turns[2]
        for sample, rewards in ((first, earned), (last, alone)):
            expected = advantages_by_hand(rewards, values_of(workspace, sample))
            found = torch.tensor(next(advantages), dtype=torch.float64)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def own_index(sample: Sample) -> int:
    """The number of the sample's rollout in its group."""
    return sample.rollout_id - (sample.draw << 20)


def values_of(workspace: Workspace, sample: Sample) -> Tensor:
    """What the critic says before each trainable token."""
    places = torch.from_numpy(sample.loss_mask).nonzero()[:, 0]
    return scores(workspace.reward_model, sample)[places - 1].double()


def advantages_by_hand(rewards: Tensor, values: Tensor) -> Tensor:
    advantages = torch.zeros_like(rewards)
    behind = value = torch.zeros((), dtype=torch.float64)
    for t in reversed(range(len(rewards))):
        behind = rewards[t] + GAMMA * value - values[t] + GAMMA * LAM * behind
        value = values[t]
        advantages[t] = behind
    return advantages


def test_it_stops_at_the_kl_of_whole_rollouts(workspace: Workspace, stopped: Run) -> None:
    """Nats a rollout, over the tokens of all its turns, each counted once."""
    assert (stopped.result["status"], stopped.result["steps"]) == ("early_stopped", 2)
    samples = samples_of(stopped, 2)
    assert len(samples) == 2 * ROLLOUTS
    policy = logprobs(policy_before(workspace, stopped, 2), samples)
    reference = logprobs(workspace.model, samples)
    gaps = [theirs - ours for ours, theirs in zip(policy, reference, strict=True)]
    total = sum(float((gap.exp() - 1 - gap).sum()) for gap in gaps)
    assert total > 0.01, "the policy has moved too little"
    assert stopped.result["objective_kl"] == pytest.approx(total / ROLLOUTS, rel=1e-3)
    found = audit(RunDirectory(stopped.folder))
    assert found.contradictions == []
    assert found.states["consumed"] == 8


def test_its_last_step_is_replayed_to_the_bit(workspace: Workspace, stopped: Run) -> None:
    again = workspace.replay(stopped, 2)
    assert again.code == 0, again.err
    for name in ("loss/policy_avg", "loss/value_avg", "train/grad_norm", "objective/kl",
                 "conversation/turns", "conversation/branches"):  # fmt: skip
        assert again.rows[1][name] == stopped.rows[2][name], name
    ours, theirs = (
        [record["advantages"] for record in read_rollouts(path)]
        for path in (again.rollouts(1), stopped.rollouts(2))
    )
    assert ours == theirs
