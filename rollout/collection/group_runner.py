"""Runs groups from their prompts through the workflow to the reward."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from rlcore.config import Config
from rlcore.data.generation import Completion, Generate, GenerateRequest
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample
from rlcore.data.sample_checks import check_sample
from rlcore.data.tokenizer import decode
from rlcore.errors import RolloutFailed
from rlcore.timeline.recorder import GROUP, group_key
from rollout.asyncio_utils import gather_or_cancel
from rollout.collection.attempts import Aborted, Attempts, GivenUp, Make, PartialRollouts
from rollout.engines.checks import folder_vocab_size
from rollout.engines.factories import kind_of
from rollout.failures import Failure
from rollout.fleet.dispatcher import Dispatcher, LockstepBatcher
from rollout.rewards.scorer import FailureCounts, Scorer
from rollout.workflows.context import WorkflowContext
from rollout.workflows.registry import build_workflow

WHOLE = -1
WorkflowKey = tuple[int, bool, int]
"""A workflow call: its draw, whether it is the greedy baseline, its rollout or WHOLE group."""
Stage = Literal["start", "generation", "workflow", "reward"]


class Stages:
    """The stage and the prompt of each unfinished workflow."""

    def __init__(self) -> None:
        self._found: dict[WorkflowKey, tuple[Stage, Prompt]] = {}
        # updated incrementally: it is read at every turn, with thousands of workflows
        self.starting = 0

    def enter(self, key: WorkflowKey, stage: Stage, prompt: Prompt) -> None:
        """Record that the workflow of this prompt has reached a stage."""
        before, _ = self._found.get(key, (None, None))
        self._found[key] = (stage, prompt)
        self.starting += (stage == "start") - (before == "start")

    def leave(self, key: WorkflowKey) -> None:
        """Remove a workflow, if it is known."""
        stage, _ = self._found.pop(key, (None, None))
        self.starting -= stage == "start"

    def waiting(self, stages: Container[str], of: Container[int] | None = None) -> dict[int, str]:
        """The draws (among `of`) in one of the stages, with the ids of their prompts."""
        return {
            draw: prompt.prompt_id
            for (draw, _, _), (stage, prompt) in self._found.items()
            if stage in stages and (of is None or draw in of)
        }


@dataclass
class Group:
    """The scored samples of one draw, with the greedy samples that only give their baseline.

    Attributes:
        unscored: further samples, whose rewards failed (`reward.on_error: drop`). They are not
            trained on, and filters do not see them.
        rewards: statistics of the rewards of all these samples. In training, a group with too
            few scored rollouts has no samples.
        failures: failed rollouts. In training the first one removes all samples: a partial group
            is never trained on. In evaluation the samples of the other rollouts remain.
        cut: an engine aborted a response, so the draw gave no samples.
    """

    draw: int
    samples: list[Sample]
    greedy: list[Sample] = field(default_factory=list)
    unscored: list[Sample] = field(default_factory=list)
    rewards: FailureCounts = field(default_factory=FailureCounts)
    failures: list[Failure] = field(default_factory=list)
    cut: bool = False

    @property
    def aborted(self) -> bool:
        """Whether an engine aborted a response, so that the draw must be repeated."""
        return self.cut or any(
            sample.finish_reason == "abort" for sample in (*self.samples, *self.greedy)
        )


class GroupRunner:
    """Runs the configured workflow over draws.

    For an engine whose results depend on its batches, the requests of all draws are submitted
    together, in the order of the draws.

    Args:
        context: constructor argument of the workflow.
        greedy: the context of the same workflow for one answer at temperature 0. Every draw runs
            it too: the mean reward of its result becomes the `baseline_reward` of the draw's
            samples.
        recorded: fields that every sample but the greedy ones must have, with the key that
            requires them.
        part_of_a_group: keep the other rollouts of a group, however few, if one fails or has no
            score, as in evaluation.
        min_scored: scored rollouts that a group needs otherwise.
    """

    def __init__(
        self,
        config: Config,
        dispatcher: Dispatcher,
        scorer: Scorer,
        context: WorkflowContext,
        *,
        greedy: WorkflowContext | None = None,
        recorded: Mapping[str, str] = MappingProxyType({}),
        part_of_a_group: bool = False,
        min_scored: int = 1,
    ) -> None:
        self.workflow_name = config.rollout.workflow.name
        self.workflow = build_workflow(context)
        self.greedy = None if greedy is None else build_workflow(greedy)
        self._seed = context.seed
        # rollouts run separately, so each waits only for itself
        self._rollouts = {
            False: _rollouts_of(self.workflow, context),
            True: _rollouts_of(self.greedy, greedy) if greedy is not None else (),
        }
        self.dispatcher = dispatcher
        self.scorer = scorer
        self.tokenizer = context.tokenizer
        self.partial = PartialRollouts(context.tokenizer)
        self.attempts = Attempts(config.rollout.workflow)
        self.part_of_a_group = part_of_a_group
        self._min_scored = min_scored
        self.batched = kind_of(config.rollout.engine.kind).batches
        self.recorded = recorded
        self._vocab_size = folder_vocab_size(config.model.path)
        self._stages = Stages()

    async def run(self, prompts: Mapping[int, Prompt]) -> list[Group]:
        """The groups of the draws, in the order of `prompts`, failed ones included.

        Args:
            prompts: prompts by draw.

        Raises:
            RunFailed: an engine or the reward failed; names it. All groups are given up then.
            UserError: the workflow reports a wrong configuration.
        """
        kinds = (False,) if self.greedy is None else (False, True)
        batcher = LockstepBatcher(self.dispatcher.batch) if self.batched else None
        generators: dict[int, dict[WorkflowKey, Generate]] = {}
        for draw, prompt in prompts.items():
            keys = [(draw, kind, rollout) for kind in kinds for rollout in self._rollouts[kind]]
            for key in keys:
                self._stages.enter(key, "start", prompt)
            generators[draw] = {
                key: batcher.enter(key) if batcher else self.dispatcher.one for key in keys
            }
        try:
            return await gather_or_cancel(
                *(self._group(prompts[draw], own, batcher) for draw, own in generators.items())
            )
        finally:
            for own in generators.values():
                for key in own:
                    self._stages.leave(key)
            if batcher:
                await batcher.close()

    async def _group(
        self,
        prompt: Prompt,
        generators: Mapping[WorkflowKey, Generate],
        batcher: LockstepBatcher | None,
    ) -> Group:
        """The scored group of one draw, or an empty group with the reason."""
        draw, _, _ = next(iter(generators))
        # inherited by the tasks that this one starts
        GROUP.set(group_key(self._seed, draw))
        group = Group(draw, [])
        work = [self._samples(key, prompt, one, batcher) for key, one in generators.items()]
        try:
            # a task costs time, so a single workflow runs in this one
            made = await gather_or_cancel(*work) if len(work) > 1 else [await work[0]]
            for (_, greedy, _), found in zip(generators, made, strict=True):
                if isinstance(found, Failure):
                    group.failures.append(found)
                else:
                    (group.greedy if greedy else group.samples).extend(found)
            _number(group.samples)
            _number(group.greedy)
            return await self._scored(group)
        except Aborted:
            return replace(group, cut=True)
        except GivenUp as given_up:
            return replace(group, failures=[given_up.failure])
        finally:
            for key in generators:
                self._stages.leave(key)
                # wait until all have ended, so that no batch holds a part of a failed group
                if batcher:
                    batcher.leave(key)

    async def _samples(
        self,
        key: WorkflowKey,
        prompt: Prompt,
        generate: Generate,
        batcher: LockstepBatcher | None,
    ) -> list[Sample] | Failure:
        """The unscored samples that one workflow makes from its prompt."""
        draw, greedy, rollout = key
        workflow: Any = self.greedy if greedy and self.greedy else self.workflow
        # versions that made at least one token
        made: set[int] = set()

        make: Make
        if rollout == WHOLE:
            make = partial(workflow, prompt, draw)
        else:
            make = partial(workflow.rollout, prompt, draw, rollout)
        try:
            samples: list[Sample] | Failure = await self.attempts.run(
                make,
                self._staged(key, prompt, generate, made),
                partial(self._checked, draw=draw, greedy=greedy, versions=made),
                of=workflow,
                where=f"{prompt.prompt_id} (draw {draw})",
                withdraw=(lambda: batcher.withdraw(key)) if batcher else (lambda: None),
            )
        except GivenUp as given_up:
            if not self.part_of_a_group:
                raise
            samples = given_up.failure
        if batcher:
            batcher.leave(key)
        if not isinstance(samples, Failure):
            bare = [s for s in samples if not s.response_text and not s.turn_spans]
            texts = decode(self.tokenizer, [one.tokens[one.loss_mask == 1] for one in bare])
            for sample, text in zip(bare, texts, strict=True):
                sample.response_text = text
        self._stages.enter(key, "reward", prompt)
        return samples

    async def _scored(self, group: Group) -> Group:
        """The same group with its rewards, from one call of the scorer.

        A rollout without a score loses all its samples. A group with too few scored rollouts, or
        without a required baseline, loses all samples.
        """
        if not group.samples:
            return group
        counts = await self.scorer.score(group.samples, group.greedy)
        lost = {sample.rollout_id for sample in group.samples if not sample.is_scored}
        scored = [sample for sample in group.samples if sample.rollout_id not in lost]
        unscored = [sample for sample in group.samples if sample.rollout_id in lost]
        baselines = [sample.reward for sample in group.greedy if sample.is_scored]
        # only if rollouts were lost: a workflow may make fewer rollouts on purpose
        few = lost and len({sample.rollout_id for sample in scored}) < self._min_scored
        if not self.part_of_a_group and (few or (group.greedy and not baselines)):
            unscored = group.samples
            scored = []
        for sample in scored if baselines else ():
            sample.baseline_reward = sum(baselines) / len(baselines)
        return replace(group, samples=scored, unscored=unscored, rewards=counts)

    def _staged(
        self, key: WorkflowKey, prompt: Prompt, generate: Generate, versions: set[int]
    ) -> Generate:
        """Wrap `generate` to complete responses, and record the workflow's stage and `versions`."""

        async def staged(request: GenerateRequest) -> list[Completion]:
            self._stages.enter(key, "generation", prompt)
            completions = await self.partial.whole(generate, request)
            self._stages.enter(key, "workflow", prompt)
            versions.update(span.version for one in completions for span in one.versions)
            return completions

        return staged

    def _checked(
        self, samples: object, *, draw: int, greedy: bool, versions: Container[int]
    ) -> list[Sample]:
        """The validated samples of a workflow. Raises RolloutFailed for any other result.

        Args:
            versions: versions of the tokens that the workflow received.
        """
        if (
            not isinstance(samples, list)
            or not samples
            or not all(isinstance(s, Sample) for s in samples)
        ):
            raise RolloutFailed(
                "result",
                f"it returned {type(samples).__name__}, expected a list of at least one Sample",
            )
        try:
            if len({id(sample) for sample in samples}) < len(samples):
                raise ValueError("it returned one sample twice, expected each once")
            for sample in samples:
                check_sample(sample, vocab_size=self._vocab_size)
                if not sample.draw == sample.group_id == draw:
                    raise ValueError(
                        f"a sample of draw {sample.draw} and group {sample.group_id}, expected"
                        f" {draw} for both, the number passed to the workflow"
                    )
                for span in sample.versions:
                    if span.version not in versions:
                        raise ValueError(
                            f"tokens of policy version {span.version}, expected versions of its"
                            " completions"
                        )
                for name, key in ({} if greedy else self.recorded).items():
                    if getattr(sample, name) is None:
                        raise ValueError(
                            f"{key} is on, but a sample has no {name}: join its completions' own"
                        )
        except (ValueError, TypeError, AttributeError) as error:
            raise RolloutFailed("result", str(error)) from error
        return samples

    def room(self, samples: int) -> int:
        """Number of groups that engines would begin at once.

        If engines batch call by call: as many as one call takes, once no batch is starting.

        Args:
            samples: samples of a group.
        """
        # these workflows will request a generation soon
        starting = self._stages.starting
        kinds = 1 if self.greedy is None else 2
        if not self.batched:
            calls = sum(len(rollouts) for rollouts in self._rollouts.values())
            # a group with more calls than slots begins when all slots are free
            calls = min(calls, self.dispatcher.most_calls)
            return (self.dispatcher.free_calls - starting) // calls if calls else 0
        free = 0 if starting else self.dispatcher.free_sequences
        return max(1, free // (samples + kinds - 1)) if free else 0

    def describe_wait(self, of: Container[int] | None = None) -> str:
        """Name what the draws wait for, for error messages. `of`: only these draws."""
        gate = "the gate (other workflows have not asked for generation)"
        parties = {
            ("start", "workflow"): f"workflow {self.workflow_name}",
            ("generation",): self.dispatcher.fleet.waiting_for() or gate,
            ("reward",): "the reward",
        }
        parts = []
        for stages, party in parties.items():
            waiting = self._stages.waiting(stages, of)
            if waiting:
                first = next(iter(waiting.values()))
                parts.append(
                    f"{len(waiting)} of the prompts wait for {party}, the first is {first}"
                )
        return "; ".join(parts) or "no prompt is unfinished"


def _rollouts_of(workflow: object, context: WorkflowContext) -> Sequence[int]:
    """The rollouts that the runner runs separately; WHOLE if the workflow makes groups."""
    by_rollout = callable(getattr(workflow, "rollout", None))
    return range(context.samples_per_prompt) if by_rollout else (WHOLE,)


def _number(samples: Sequence[Sample]) -> None:
    """Number the samples of a draw if a rollout made several."""
    if len({sample.index for sample in samples}) < len(samples):
        for place, sample in enumerate(samples):
            sample.index = place
