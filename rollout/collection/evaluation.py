"""Scores sets of held-out prompts with the weights in force."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlcore.algorithms.rollout_metrics import PREFIX, conversation_metrics
from rlcore.config import Config
from rlcore.config.evaluation_sets import SET_KEY, EvaluationSet, evaluation_sets
from rlcore.config.sections.reward import RewardConfig
from rlcore.data.prompts import PromptSet
from rlcore.data.sample import Sample
from rlcore.errors import RunFailed, TooManyFailed
from rollout.asyncio_utils import gather_or_cancel
from rollout.collection.evaluation_metrics import quoted_metrics, rollouts_of, verdict_of
from rollout.collection.group_runner import Group, GroupRunner, evaluation_runner
from rollout.conversation.samples import of_prompt
from rollout.failures import commonest
from rollout.fleet.dispatcher import Dispatcher
from rollout.rewards.scorer import VERDICTS, FailureCounts, Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
Scored = tuple[dict[str, float], list[Sample]]


@dataclass
class HeldOutSet:
    """The prompts of one set, with the workflow and scorer of its samples."""

    given: EvaluationSet
    prompts: PromptSet
    runner: GroupRunner
    failed_reward: float  # reward of a failed rollout
    is_running: bool = False
    has_scores: bool = False  # whether any evaluation of the set had a score

    async def run(self) -> Scored:
        """The metrics of all prompts and the samples behind them.

        Samples whose reward failed (`reward.on_error: drop`) are excluded from all means.

        Raises:
            TooManyFailed: all rewards of the set failed, now and in every earlier evaluation.
            Exception: as `GroupRunner.run`.

        The draw of a prompt is its row. So the random numbers (for a temperature above 0) depend on
        set and prompt alone, and are the same in each evaluation.
        """
        self.is_running = True
        try:
            groups = await self.runner.run(
                {row: self.prompts[row] for row in range(len(self.prompts))}
            )
        finally:
            self.is_running = False
        failures = [failure for group in groups for failure in group.failures]
        standing = [self._failed(group) for group in groups]
        scored = [[*group.samples, *failed] for group, failed in zip(groups, standing)]
        samples = [
            sample for group, made in zip(groups, scored) for sample in (*made, *group.unscored)
        ]
        rewards = FailureCounts()
        for group in groups:
            rewards.add(group.rewards)
        failed = sum(map(len, standing))
        if failed == len(samples):
            first, count = commonest(failures)
            raise RunFailed(
                f"all {failed} rollouts of the evaluation failed; the commonest failure, {count}"
                f" times: {first}"
            )
        if len(rewards.unscored) < rewards.samples:
            self.has_scores = True
        elif rewards.unscored and not self.has_scores:
            first, count = commonest(rewards.unscored)
            name = f" of set {self.given.name}" if self.given.name else ""
            raise TooManyFailed(
                f"the rewards of all {rewards.samples} samples of the evaluation{name} failed; the"
                f" commonest failure, {count} times: {first}"
            )
        if self.given.name:
            for sample in samples:
                sample.metadata[SET_KEY] = self.given.name
        # in a thread: for a thousand prompts of 64 answers this takes seconds
        by_prompt = [made for made in scored if made]
        quoted = await asyncio.to_thread(quoted_metrics, by_prompt, self.given)
        metrics = {
            **means([answer for group in by_prompt for answer in rollouts_of(group)]),
            **quoted,
            "reward_errors": float(rewards.errors),
            "reward_timeouts": float(rewards.timeouts),
            "unscored": float(len(rewards.unscored)),
            "failed": float(failed),
        }
        return {self.given.prefix + name: value for name, value in metrics.items()}, samples

    def _failed(self, group: Group) -> list[Sample]:
        """Placeholders for failed rollouts: wrong answers without a token.

        Without them, failures would raise the score. Nothing is trained on them.
        """
        if not group.failures:
            return []
        made = [*group.samples, *group.unscored]
        known = {sample.rollout_id for sample in made}
        failure = group.failures[0]
        prompt = self.prompts[group.draw]
        standing: list[Sample] = []
        for index in range(self.given.samples_per_prompt):
            fields = of_prompt(prompt, group.draw, index)
            if fields["rollout_id"] in known:
                continue
            fields["index"] = len(made) + len(standing)
            # a data column of that name is not a verdict
            row = {key: value for key, value in prompt.row.items() if key not in VERDICTS}
            fields["metadata"] = row | {"reward_error": str(failure)}
            standing.append(
                Sample(
                    **fields,
                    tokens=prompt.tokens,
                    loss_mask=np.zeros(len(prompt.tokens), dtype=np.uint8),
                    rollout_logprobs=np.zeros(0, dtype=np.float32),
                    versions=(),
                    finish_reason="timeout" if failure.kind == "timeout" else "env",
                    reward=self.failed_reward,
                )
            )
        return standing


class Evaluator:
    """All sets of held-out prompts. Sets that are due together run together.

    Args:
        scorer: scorer of the run's reward.
        load_prompts: reads the prompts of a set.
        build_scorer: makes the scorer of a set that configures its own reward.

    Raises:
        UserError: bad prompts, labels or rewards.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        dispatcher: Dispatcher,
        scorer: Scorer,
        *,
        load_prompts: Callable[[EvaluationSet], PromptSet],
        build_scorer: Callable[[RewardConfig], Scorer],
    ) -> None:
        # scorers by configuration, so that equal rewards share their workers
        own: dict[str, Scorer] = {}
        self.sets: list[HeldOutSet] = []
        for given in evaluation_sets(config):
            prompts = load_prompts(given)
            used = scorer
            if given.reward is not None and given.reward != config.reward:
                key = given.reward.model_dump_json()
                used = own.get(key) or own.setdefault(key, build_scorer(given.reward))
            runner = evaluation_runner(config, tokenizer, dispatcher, used, given)
            reward = given.reward or config.reward
            failed_reward = 0.0 if reward.on_error == "drop" else reward.on_error
            self.sets.append(HeldOutSet(given, prompts, runner, failed_reward))
        self.own_scorers = tuple(own.values())

    async def start(self) -> None:
        """Start the workers of rewards that only sets use."""
        await gather_or_cancel(*(scorer.start() for scorer in self.own_scorers))

    async def close(self) -> None:
        """End the workers of rewards that only sets use."""
        await gather_or_cancel(*(scorer.close() for scorer in self.own_scorers))

    def records(self) -> dict[str, dict[str, Any]]:
        """Records by set, against which a resumed run compares its sets."""
        return {one.given.key: one.prompts.record.saved() for one in self.sets}

    def warn_of_changes(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Log sets that differ from those of the saved run, given by its `records`."""
        for one in self.sets:
            before = saved.get(one.given.key)
            now = one.prompts.record
            if before is not None and before != now.saved():
                logger.warning(
                    "%s: the held-out rows are not those of the saved run%s; measurements from here"
                    " on are not comparable with earlier ones (checkpoint.best and early stopping"
                    " compare them)",
                    one.given.key,
                    now.changes(before),
                )

    def chosen(self, names: Sequence[str] | None) -> list[HeldOutSet]:
        """The sets called `names`; None: all."""
        return [one for one in self.sets if names is None or one.given.name in names]

    async def run(self, names: Sequence[str] | None) -> Scored:
        """Metrics and samples of the sets `names`; None: all."""
        found = await gather_or_cancel(*(one.run() for one in self.chosen(names)))
        metrics: dict[str, float] = {}
        samples: list[Sample] = []
        for measured, made in found:
            metrics |= measured
            samples += made
        return metrics, samples

    def describe_wait(self) -> str:
        """Name what the prompts wait for, for error messages."""
        return "; ".join(
            (f"set {one.given.name}: " if one.given.name else "") + one.runner.describe_wait()
            for one in self.sets
            if one.is_running
        )


def means(rollouts: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Means over rollouts, each given by its samples, and over their conversations' measurements.

    `accuracy` is the share of right answers; it is absent without verdicts. Without rollouts the
    result is empty.
    """
    n = len(rollouts)
    if not n:
        return {}
    samples = [sample for rollout in rollouts for sample in rollout]
    verdicts = [right for rollout in rollouts if (right := verdict_of(rollout)) is not None]
    judged = any("correct" in s.metadata for s in samples)
    measured = conversation_metrics([sample.measured for sample in samples])
    return {
        **{name.removeprefix(PREFIX): value for name, value in measured.items()},
        "score": sum(rollout[0].reward for rollout in rollouts) / n,
        **({"accuracy": sum(verdicts) / len(verdicts)} if judged else {}),
        "sequence_lengths": sum(s.num_trainable for s in samples) / n,
        "stop_token_rate": sum(rollout[-1].finish_reason == "stop" for rollout in rollouts) / n,
    }
