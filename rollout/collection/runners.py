"""How training and evaluation run their waves: which sampling, which random numbers, and whether with a greedy baseline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rlcore.config import Config
from rlcore.config.derived import recorded_fields
from rlcore.data.tokenizer import stop_token_ids
from rlcore.interfaces import Prompt, SamplingParams, Workflow
from rollout.collection.group_runner import GroupRunner
from rollout.collection.partial import PartialRollouts
from rollout.fleet.dispatcher import Dispatcher
from rollout.rewards.scorer import Scorer
from rollout.workflows import WorkflowContext, build_workflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

EVALUATION_SEED = 0x6576616C    # keeps evaluation's random numbers apart from training's
BASELINE_SEED = 0x67726565      # keeps the addresses of greedy requests apart from those of the samples beside them

PromptOf = Callable[[int], Prompt]
"""The prompt of a draw."""


@dataclass(frozen=True)
class Runners:
    """Builds the `GroupRunner`s of a service, which share its engines and its reward."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    dispatcher: Dispatcher
    scorer: Scorer

    def training(self, prompt_of: PromptOf, *, greedy_baseline: bool) -> GroupRunner:
        rollout, seed, greedy = self.config.rollout, self.config.run.seed, self._greedy()
        given = rollout.sampling
        policy = self.config.policy
        sampling = replace(
            greedy, temperature=given.temperature, top_p=given.top_p, top_k=given.top_k,
            sampling_mask=policy.logprobs.keep_sets, routed_experts=policy.routing_replay == "engine",
        )  # fmt: skip
        workflow = self._workflow(sampling, rollout.samples_per_prompt, seed)
        baseline = self._workflow(greedy, 1, seed + BASELINE_SEED) if greedy_baseline else None
        return replace(self._runner(workflow, prompt_of, baseline), recorded=recorded_fields(self.config))

    def evaluation(self, prompt_of: PromptOf) -> GroupRunner:
        given, seed = self.config.evaluation, self.config.run.seed + EVALUATION_SEED
        sampling = replace(self._greedy(given.max_new_tokens), temperature=given.temperature)
        return self._runner(self._workflow(sampling, given.samples_per_prompt, seed), prompt_of)

    def _greedy(self, max_new_tokens: int | None = None) -> SamplingParams:
        """Temperature 0, with the stops and, by default, the length of training."""
        given = self.config.rollout.sampling
        return SamplingParams(
            max_new_tokens=max_new_tokens or given.max_new_tokens,
            temperature=0.0,
            stop_token_ids=stop_token_ids(self.tokenizer, given.stop_token_ids),
            stop=tuple(given.stop),
        )

    def _workflow(self, sampling: SamplingParams, samples: int, seed: int) -> Workflow:
        return build_workflow(self.config.rollout.workflow, WorkflowContext(sampling, samples, seed, self.tokenizer))

    def _runner(self, workflow: Workflow, prompt_of: PromptOf, greedy: Workflow | None = None) -> GroupRunner:
        return GroupRunner(
            workflow=workflow,
            workflow_name=self.config.rollout.workflow,
            prompt_of=prompt_of,
            dispatcher=self.dispatcher,
            scorer=self.scorer,
            tokenizer=self.tokenizer,
            partial=PartialRollouts(self.tokenizer),
            batched=self.config.rollout.engine.kind == "embedded",
            greedy=greedy,
        )
