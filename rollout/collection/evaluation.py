"""Scores held-out prompts with the weights in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlcore.data.prompts import PromptSet
from rlcore.data.sample import Sample
from rollout.collection.group_runner import GroupRunner


async def evaluate(
    runner: GroupRunner, prompts: PromptSet
) -> tuple[dict[str, float], list[Sample]]:
    """The metrics `eval/*` of all prompts and the samples behind them. Raises as `GroupRunner.run`.

    The draw of a prompt is its row. So the random numbers (for a temperature above 0) depend on the
    prompt alone, and are the same in each evaluation.
    """
    failures = runner.failures
    before = replace(failures)
    groups = await runner.run({row: prompts[row] for row in range(len(prompts))})
    samples = [sample for group in groups for sample in group.samples]
    return {
        **means(samples),
        "eval/reward_errors": float(failures.errors - before.errors),
        "eval/reward_timeouts": float(failures.timeouts - before.timeouts),
    }, samples


def means(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over samples.

    `eval/accuracy` is the share of right answers, and absent where nothing says right or wrong.
    """
    n = len(samples)
    verdicts = [right for s in samples if (right := verdict(s)) is not None]
    judged = any("correct" in s.metadata for s in samples)
    return {
        "eval/score": sum(s.reward for s in samples) / n,
        **({"eval/accuracy": sum(verdicts) / len(verdicts)} if judged else {}),
        "eval/sequence_lengths": sum(s.num_trainable for s in samples) / n,
        "eval/stop_token_rate": sum(s.finish_reason == "stop" for s in samples) / n,
    }


def verdict(sample: Sample) -> bool | None:
    """Whether the answer is right; None if nothing says so.

    A sample whose reward failed counts as wrong: left out, it would raise the accuracy.
    """
    if "correct" in sample.metadata:
        return bool(sample.metadata["correct"])
    return False if "reward_error" in sample.metadata else None
