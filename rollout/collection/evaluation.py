"""Scores sets of held-out prompts with the weights in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlcore.config import Config
from rlcore.config.evaluation_sets import SET_KEY, EvaluationSet, evaluation_sets
from rlcore.config.sections.reward import RewardConfig
from rlcore.data.prompts import PromptSet
from rlcore.data.sample import Sample
from rollout.asyncio_utils import gather_or_cancel
from rollout.collection.evaluation_metrics import quoted_metrics, verdict
from rollout.collection.group_runner import GroupRunner, evaluation_runner
from rollout.fleet.dispatcher import Dispatcher
from rollout.rewards.scorer import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Scored = tuple[dict[str, float], list[Sample]]


@dataclass
class HeldOutSet:
    """The prompts of one set, and what makes and scores its samples."""

    given: EvaluationSet
    prompts: PromptSet
    runner: GroupRunner
    is_running: bool = False

    async def run(self) -> Scored:
        """The metrics of all prompts and the samples behind them. Raises as `GroupRunner.run`.

        The draw of a prompt is its row. So the random numbers (for a temperature above 0) depend on
        the set and the prompt alone, and are the same in each evaluation.
        """
        failures = self.runner.failures
        before = replace(failures)
        self.is_running = True
        try:
            groups = await self.runner.run(
                {row: self.prompts[row] for row in range(len(self.prompts))}
            )
        finally:
            self.is_running = False
        samples = [sample for group in groups for sample in group.samples]
        if self.given.name:
            for sample in samples:
                sample.metadata[SET_KEY] = self.given.name
        by_prompt = [group.samples for group in groups]
        # not in the loop: for a thousand prompts of 64 answers this takes seconds
        quoted = await asyncio.to_thread(quoted_metrics, by_prompt, self.given)
        metrics = {
            **means(samples),
            **quoted,
            "reward_errors": float(failures.errors - before.errors),
            "reward_timeouts": float(failures.timeouts - before.timeouts),
        }
        return {self.given.prefix + name: value for name, value in metrics.items()}, samples

    def stuck(self) -> str:
        """Whom its prompts wait for."""
        name = f"set {self.given.name}: " if self.given.name else ""
        return name + self.runner.stuck()


class Evaluator:
    """All sets of held-out prompts. Those that are due together are in flight together.

    Args:
        scorer: of the run's reward.
        load_prompts: reads the prompts of a set.
        build_scorer: makes the scorer of a set with a reward of its own.

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
        own: dict[str, Scorer] = {}  # by their configuration: equal rewards share their workers
        self.sets: list[HeldOutSet] = []
        for given in evaluation_sets(config):
            prompts = load_prompts(given)
            used = scorer
            if given.reward is not None and given.reward != config.reward:
                key = given.reward.model_dump_json()
                used = own.get(key) or own.setdefault(key, build_scorer(given.reward))
            runner = evaluation_runner(config, tokenizer, dispatcher, used, given)
            self.sets.append(HeldOutSet(given, prompts, runner))
        self.own_scorers = tuple(own.values())
        self._scorers = (scorer, *self.own_scorers)

    async def start(self) -> None:
        """Start the rewards that only sets have."""
        await gather_or_cancel(*(scorer.start() for scorer in self.own_scorers))

    async def close(self) -> None:
        """End the rewards that only sets have."""
        await gather_or_cancel(*(scorer.close() for scorer in self.own_scorers))

    def check_works(self) -> None:
        """Refuse a reward that failed on every sample of the first evaluation (EmptyBatch)."""
        for scorer in self._scorers:
            scorer.check_works("evaluation", "the evaluation")

    def has(self, names: Sequence[str] | None) -> bool:
        """Whether there is anything to score among the sets `names`; None: among all."""
        return bool(self._chosen(names))

    def _chosen(self, names: Sequence[str] | None) -> list[HeldOutSet]:
        return [one for one in self.sets if names is None or one.given.name in names]

    async def run(self, names: Sequence[str] | None) -> Scored:
        """Metrics and samples of the sets `names`, of all if None."""
        found = await gather_or_cancel(*(one.run() for one in self._chosen(names)))
        metrics: dict[str, float] = {}
        samples: list[Sample] = []
        for measured, made in found:
            metrics |= measured
            samples += made
        return metrics, samples

    def stuck(self) -> str:
        """Whom the prompts wait for, for error messages."""
        return "; ".join(one.stuck() for one in self.sets if one.is_running)


def means(samples: Sequence[Sample]) -> dict[str, float]:
    """Means over samples.

    `accuracy` is the share of right answers, and absent where nothing says right or wrong.
    """
    n = len(samples)
    verdicts = [right for s in samples if (right := verdict(s)) is not None]
    judged = any("correct" in s.metadata for s in samples)
    return {
        "score": sum(s.reward for s in samples) / n,
        **({"accuracy": sum(verdicts) / len(verdicts)} if judged else {}),
        "sequence_lengths": sum(s.num_trainable for s in samples) / n,
        "stop_token_rate": sum(s.finish_reason == "stop" for s in samples) / n,
    }
