"""Inputs of estimators beyond the outcome reward: greedy baselines, a teacher, process rewards.

Each is compared with transformers in float64 on the weights that made the samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accounting_checks import read_samples
from hf_logprobs import logprobs, policy_before
from rank_runs import Ended, RankRuns
from torch import Tensor
from workspace import LEARNING, Run, Workspace, same, score_of

from rlcore.data.sample import Sample
from rlcore.data.tokenizer import load_tokenizer
from rlcore.launch.commands.init_model import ALPHABETS, ModelSpec, init_model
from rlcore.runs.rollouts import read_rollouts

EVERY_WEIGHT = ("checkpoint.every=1", "checkpoint.keep=9", "checkpoint.export_hf=false")
REMAX = (*LEARNING, *EVERY_WEIGHT, "algorithm.estimator.name=remax")
# Nothing discounted to or from other tokens: each advantage is its token's own reward.
ALONE = (
    *LEARNING,
    *EVERY_WEIGHT,
    "algorithm.estimator={name: reinforce++, gamma: 0.0}",
    "algorithm.normalize_advantages=none",
)
NEW_TOKENS = 6
EOS = 1


def records_of(run: Run | Ended, step: int) -> list[dict[str, Any]]:
    return read_rollouts(run.folder / "rollouts" / f"step_{step:06d}.parquet")


def advantages_of(run: Run | Ended, step: int) -> list[Tensor]:
    return [
        torch.tensor(record["advantages"], dtype=torch.float64) for record in records_of(run, step)
    ]


# --- the greedy baseline --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def remax(workspace: Workspace) -> Run:
    return workspace.train("remax", *REMAX)


@torch.no_grad()
def greedy_rewards(model: Path, prompts: list[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """The score of the most likely response to each prompt."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    tokenizer = load_tokenizer(str(model))
    scores = {}
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        while tokens.shape[1] < len(prompt) + NEW_TOKENS and (
            tokens.shape[1] == len(prompt) or tokens[0, -1] != EOS
        ):
            tokens = torch.cat([tokens, policy(tokens).logits[:, -1:].argmax(-1)], 1)
        scores[prompt] = score_of(tokenizer.decode(tokens[0], skip_special_tokens=True))
    return scores


def prompt_of(sample: Sample) -> tuple[int, ...]:
    return tuple(sample.tokens[sample.loss_mask == 0].tolist())


def assert_baselines(
    workspace: Workspace, run: Run | Ended, step: int, policy: Path
) -> list[float]:
    samples = read_samples(run.folder, step)
    assert len(samples) == 16, "the greedy responses are not among the samples"
    expected = greedy_rewards(policy, list(dict.fromkeys(map(prompt_of, samples))))
    assert len(set(expected.values())) > 1
    baselines = []
    for sample, advantages in zip(samples, advantages_of(run, step), strict=True):
        assert sample.baseline_reward is not None
        assert same(sample.baseline_reward, expected[prompt_of(sample)], rel=1e-4, abs_=1e-5)
        assert torch.allclose(
            advantages, torch.tensor(sample.reward - sample.baseline_reward).double(), atol=1e-6
        )
        baselines.append(sample.baseline_reward)
    return baselines


def test_the_baseline_is_the_reward_of_the_greedy_response(
    workspace: Workspace, remax: Run
) -> None:
    assert remax.code == 0, remax.err
    for step in (1, 2, 3):
        baselines = assert_baselines(workspace, remax, step, policy_before(workspace, remax, step))
        row = remax.rows[step]
        assert same(row["rollout/baseline_reward"], float(np.mean(baselines)))
        assert row["episode"] == 16 * step
        assert row["train/grad_norm"] > 0.0


def test_other_estimators_cost_no_greedy_response(workspace: Workspace, remax: Run) -> None:
    """And a recording without baselines cannot be replayed with an estimator that needs them."""
    grpo = workspace.train("grpo", *LEARNING, "training.steps=1", "checkpoint.export_hf=false")
    assert all(sample.baseline_reward is None for sample in read_samples(grpo.folder, 1))
    assert "rollout/baseline_reward" not in grpo.rows[1]
    refused = workspace.replay(grpo, 1, "algorithm.estimator.name=remax")
    assert refused.code == 2
    assert "was recorded without the greedy baselines" in refused.err
    assert not refused.folder.exists()


def unversioned(run: Run, step: int) -> list[dict[str, Any]]:
    """Drop the versions, which count publications: a resumed run makes one more.

    And the trainer's log-probs, of which the engine check asks at the first step of a process.
    """
    found = records_of(run, step)
    for record in found:
        record["vectors"].pop("logprobs", None)
    return [
        {key: value for key, value in record.items() if "version" not in key} for record in found
    ]


def test_a_resumed_run_has_the_same_baselines(workspace: Workspace, remax: Run) -> None:
    workspace.train("remax again", *REMAX, "training.steps=1")
    resumed = workspace.train("remax again", *REMAX, "--resume")
    assert resumed.code == 0, resumed.err
    for step in (2, 3):
        assert unversioned(resumed, step) == unversioned(remax, step)


def test_a_replay_knows_the_baselines(workspace: Workspace, remax: Run) -> None:
    again = workspace.replay(remax, 2)
    assert again.code == 0, again.err
    for name in (
        "rollout/baseline_reward",
        "loss/policy_avg",
        "train/grad_norm",
        "objective/scores",
    ):
        assert again.rows[1][name] == remax.rows[2][name], name


# --- the teacher ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def warm(workspace: Workspace) -> Path:
    """A model of the policy's architecture that has learnt a little addition."""
    run = workspace.sft("warm", "training.steps=40", "policy.optimizer.lr=1e-2")
    assert run.code == 0, run.err
    return run.folder / "hf"


@pytest.fixture(scope="module")
def larger(workspace: Workspace) -> Path:
    folder = workspace.folder / "larger"
    init_model(
        folder,
        ModelSpec(hidden=48, layers=3, heads=4, kv_heads=4, intermediate=80, tied=False, seed=9),
    )
    return folder


def assert_taught(
    run: Run | Ended, step: int, policy: Path, teacher: Path, *, temperature: float = 1.0
) -> None:
    """With `ALONE` and a coefficient of 0.5: the token's reward, and the outcome on the last."""
    samples = read_samples(run.folder, step)
    own = logprobs(policy, samples, temperature)
    taught = logprobs(teacher, samples, temperature)
    for sample, advantages, mine, theirs in zip(
        samples, advantages_of(run, step), own, taught, strict=True
    ):
        expected = 0.5 * (theirs - mine)
        expected[-1] += sample.reward
        assert torch.allclose(advantages, expected, atol=2e-5), (advantages, expected)
    assert max(float((a - b).abs().max()) for a, b in zip(own, taught)) > 1e-2


@pytest.mark.parametrize(
    ("teacher", "offload", "temperature"),
    [
        ("larger", False, 0.7),
        ("larger", True, 1.0),
        ("warm", True, 1.0),
        pytest.param("warm", False, 1.0, marks=pytest.mark.full),
    ],
)
def test_each_token_earns_what_the_teacher_thinks_of_it(
    workspace: Workspace,
    teacher: str,
    offload: bool,
    temperature: float,
    request: pytest.FixtureRequest,
) -> None:
    """coef x (teacher - policy), and the outcome on the last token; tempered as the samples."""
    folder: Path = request.getfixturevalue(teacher)
    distil = (f"teacher={{path: {folder}, offload: {offload}}}", "algorithm.distillation.coef=0.5")
    run = workspace.train(
        f"taught by {teacher} {offload}",
        *ALONE,
        *distil,
        f"rollout.sampling.temperature={temperature}",
    )
    assert run.code == 0, run.err
    assert run.lines("models     policy + teacher")
    for step in (1, 3):
        assert_taught(
            run, step, policy_before(workspace, run, step), folder, temperature=temperature
        )
    if teacher == "larger":
        again = workspace.replay(run, 3)
        assert again.code == 0, again.err
        assert again.rows[1]["loss/policy_avg"] == run.rows[3]["loss/policy_avg"]


@pytest.mark.full
def test_ranks_share_the_teacher_as_they_do_the_policy(
    workspace: Workspace, rank_runs: RankRuns, larger: Path
) -> None:
    """Two ranks, tensor-parallel; the teacher is offloaded, the engine is a process of its own."""
    distil = (f"teacher={{path: {larger}, offload: true}}", "algorithm.distillation.coef=0.5")
    run = rank_runs.train(
        "taught ranks", *ALONE, *distil, "policy.parallel.tensor=2", "training.steps=2"
    )
    assert run.code == 0, run.said
    assert_taught(run, 1, workspace.model, larger)
    remax = rank_runs.train("remax ranks", *REMAX, "policy.parallel.tensor=2", "training.steps=1")
    assert remax.code == 0, remax.said
    assert_baselines(workspace, remax, 1, workspace.model)


def test_the_policy_learns_from_the_teacher_alone(workspace: Workspace, warm: Path) -> None:
    """With a reward of weight 0: the KL to the teacher on the policy's own samples falls."""
    distil = (
        f"teacher.path={warm}",
        "algorithm.distillation.coef=1.0",
        "reward.parts.liked.weight=0",
    )
    run = workspace.train("student", "policy.optimizer.lr=1e-2", *distil,
                    "algorithm.estimator={name: reinforce++, gamma: 0.0}", "training.steps=40",
                    "rollout.prompts_per_step=8", "algorithm.normalize_advantages=none",
                    "checkpoint.export_hf=false")  # fmt: skip
    assert run.code == 0, run.err

    def divergence(steps: range) -> float:
        """Mean of policy - teacher over tokens, which is minus the advantage."""
        return -float(torch.cat([torch.cat(advantages_of(run, step)) for step in steps]).mean())

    first = divergence(range(1, 4))
    last = divergence(range(38, 41))
    assert first > 0.3
    assert last < 0.5 * first, (first, last)


def test_a_teacher_of_another_vocabulary_is_refused(workspace: Workspace, tmp_path: Path) -> None:
    init_model(
        tmp_path / "other",
        ModelSpec(alphabet=ALPHABETS["ascii"], hidden=32, layers=2, heads=4, kv_heads=2),
    )
    refused = workspace.train(
        "other vocabulary",
        *ALONE,
        f"teacher.path={tmp_path / 'other'}",
        "algorithm.distillation.coef=1",
    )
    assert refused.code == 2
    (line,) = refused.err.strip().splitlines()
    assert "teacher.path" in line
    assert "vocabulary of 99" in line
    assert "31" in line
    assert not refused.folder.exists()


# --- process rewards ------------------------------------------------------------------------------

WORKFLOW = """
import numpy as np
from rollout.workflows.single_turn import SingleTurn

class Digits(SingleTurn):
    \"\"\"Every second sample: 0.25 for each token below 6.\"\"\"

    async def __call__(self, prompt, draw, generate):
        samples = await super().__call__(prompt, draw, generate)
        for sample in samples[::2]:
            made = sample.tokens[sample.loss_mask == 1]
            sample.token_rewards = np.where(made < 6, 0.25, 0.0).astype(np.float32)
        return samples
"""


def test_process_rewards_of_a_workflow_reach_the_estimator(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "process.py").write_text(WORKFLOW)
    monkeypatch.syspath_prepend(tmp_path)
    run = workspace.train("process", *ALONE, "rollout.workflow=process:Digits")
    assert run.code == 0, run.err
    rewarded = 0
    for sample, advantages in zip(read_samples(run.folder, 2), advantages_of(run, 2), strict=True):
        made: Any = sample.tokens[sample.loss_mask == 1]
        expected = 0.25 * torch.from_numpy(made < 6).double() * (sample.index % 2 == 0)
        rewarded += int(expected.count_nonzero())
        expected[-1] += sample.reward
        assert torch.allclose(advantages, expected, atol=1e-6)
        assert (sample.token_rewards is None) == (sample.index % 2 == 1)
    assert rewarded > 3
    again = workspace.replay(run, 2)
    assert again.rows[1]["loss/policy_avg"] == run.rows[2]["loss/policy_avg"]
