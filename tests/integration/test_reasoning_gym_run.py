"""reasoning-gym's rows and scores through the real commands: data, train, evaluation."""

from __future__ import annotations

from workspace import Workspace

from rlcore.runs.rollouts import read_rollouts


def test_tasks_of_reasoning_gym_train_as_they_are(workspace: Workspace) -> None:
    model = workspace.chat_model()
    given = (
        f"run.dir={workspace.folder / 'runs'}", "run.name=gym", "run.threads=1",
        f"model.path={model}", "model.dtype=fp32", "data.as_chat=true",
        'data.paths=["reasoning-gym:chain_sum?seed=1&size=8", "reasoning-gym:gcd?seed=1&size=8"]',
        'evaluation.paths=["reasoning-gym:chain_sum?seed=2&size=4"]', "evaluation.every=2",
        "policy.max_tokens_per_microbatch=1024", "rollout.prompts_per_step=8",
        "rollout.samples_per_prompt=2", "rollout.sampling.max_new_tokens=6",
        "reward.parts.right.function=reasoning_gym", "reward.workers=1", "reward.timeout_s=60",
        "training.steps=2",
    )  # fmt: skip
    shown = workspace.command("data", *given)
    assert shown.code == 0, shown.err
    assert "chain_sum?seed=1&size=8: 8 rows, format openai, prompt in 'question'" in shown.out
    assert "reward   1 for the label itself" in shown.out
    run = workspace.command("train", *given, name="gym")
    assert run.code == 0, run.err
    samples = [*read_rollouts(run.rollouts(1)), *read_rollouts(run.rollouts(2))]
    assert {s["metadata"]["reasoning_gym"]["task"] for s in samples} == {"chain_sum", "gcd"}
    assert all(s["metadata"]["correct"] in (True, False) for s in samples)
    assert [run.rows[step]["rollout/reward_errors"] for step in (1, 2)] == [0, 0]
    assert "eval/accuracy" in run.rows[2]
